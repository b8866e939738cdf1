"""The plan of a daemon's first look around."""

from hypothesis import given
from hypothesis import strategies as st

from forkd.model.names import parse_tag
from forkd.model.sandbox import State
from forkd.runtime.recovery import make_plan
from forkd.runtime.registry import SandboxRecord

NAMES = st.sampled_from([f"sb-{n:010x}" for n in range(12)])


def _record(name: str, state: State) -> SandboxRecord:
    return SandboxRecord(0, name, parse_tag("t"), state, 0.0, "fake", "none", 1)


@given(
    st.dictionaries(NAMES, st.sampled_from(State)),
    st.sets(NAMES),
    st.sets(NAMES),
)
def test_every_row_process_and_directory_has_exactly_one_fate(
    rows: dict[str, State], running: set[str], directories: set[str]
) -> None:
    plan = make_plan([_record(name, state) for name, state in rows.items()], running, running | directories)
    fates = [record.id for group in (plan.adopt, plan.bury, plan.drop, plan.keep) for record in group]
    assert sorted(fates) == sorted(rows)
    assert plan.strays == (running | directories) - rows.keys()
    assert all(record.id in running for record in plan.adopt)
    assert not any(record.id in running for record in plan.bury)


def test_what_was_half_started_or_half_removed_is_dropped_though_it_runs() -> None:
    rows = [_record("sb-0000000001", State.STARTING), _record("sb-0000000002", State.STOPPING)]
    plan = make_plan(rows, {"sb-0000000001", "sb-0000000002"}, {"sb-0000000001", "sb-0000000002"})
    assert plan.drop == tuple(rows)
    assert plan.adopt == ()
