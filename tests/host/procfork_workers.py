"""What the workers of the program `threads` find, when they look at themselves."""

from dataclasses import dataclass

from procfork_cases import Subject

_FIRST_BLOCKED = 40


@dataclass(frozen=True)
class Report:
    tid: int
    pid: int
    local: int
    changed_registers: int
    rounds_as_it_did: bool
    is_itself: bool
    mask: int
    name: str
    robust_failures: int


def check(subject: Subject) -> dict[int, Report]:
    """Each worker is woken, looks at itself and waits again."""
    found = {}
    for line in subject.ask("check").splitlines():
        index, tid, pid, local, changed, rounds, itself, mask, name, robust = line.split()
        numbers = (int(tid), int(pid), int(local), int(changed), rounds == "1", itself == "1", int(mask, 16))
        found[int(index)] = Report(*numbers, name, int(robust))
    return found


def assert_sound(subject: Subject) -> dict[int, Report]:
    reports = check(subject)
    tids = {index: report.tid for index, report in reports.items()}
    assert reports == {
        index: Report(
            tid, subject.pid, 1000 + index, 0, True, True, 1 << _FIRST_BLOCKED + index - 1, f"worker-{index}", 0
        )
        for index, tid in tids.items()
    }
    assert len({*tids.values(), subject.pid}) == len(tids) + 1
    assert {*tids.values(), subject.pid} < {*subject.tids()}
    assert subject.ask("main") == "0 999 1"
    return reports
