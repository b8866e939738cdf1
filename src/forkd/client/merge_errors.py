"""What becomes of a merge that is not made, or not to its end."""

from __future__ import annotations

from collections.abc import Sequence

from forkd.client.merge_plan import MergePlan
from forkd.errors import Conflict, ForkdError

_SHOWN = 1000


class MergeConflicts(Conflict):
    """Parent and child have both changed. Nothing was written; `plan.conflicts` says where and how."""

    def __init__(self, plan: MergePlan) -> None:
        count = len(plan.conflicts)
        lines = [f"{each.path}: {each.why}" for each in plan.conflicts[:_SHOWN]]
        if count > _SHOWN:
            lines.append(f"and {count - _SHOWN} more")
        super().__init__(
            f"The merge has {count} conflict{'s' if count > 1 else ''}; nothing was written",
            hint="Let the child win by force, or copy what you want of it",
            details="\n".join(lines),
        )
        self.plan = plan


class MergeIncomplete(ForkdError):
    """A merge failed half-way. `applied` and `left` are the paths that are, and are not, as in the child now."""

    code = "merge_incomplete"

    def __init__(self, cause: ForkdError, applied: Sequence[str] | None, left: Sequence[str]) -> None:
        said = "what was written is not known" if applied is None else f"{len(applied)} of "
        if applied is not None:
            said += f"{len(applied) + len(left)} changes were made"
        shown = [f"not made: {path}" for path in left[:_SHOWN]]
        if len(left) > _SHOWN:
            shown.append(f"and {len(left) - _SHOWN} more")
        hint = f"{cause.hint}. Then merge again" if cause.hint else "Merge again: what was made is not made twice"
        super().__init__(f"The merge failed: {cause.message}; {said}", hint=hint, details="\n".join(shown) or None)
        self.exit_code = cause.exit_code
        self.applied = applied
        self.left = left
