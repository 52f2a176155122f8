"""What ends a run, or one rollout of it, as opposed to a bug: the message alone tells a user why and what to do."""


class RunError(RuntimeError):
    """A run that cannot start or go on."""


class LostPayload(RunError):
    """Packs of these groups are gone, with the node that held them; nothing was trained."""

    def __init__(self, groups: list[str]) -> None:
        super().__init__(f"the payload of {', '.join(groups)} is lost")
        self.groups = groups

    def __reduce__(self) -> tuple:
        return type(self), (self.groups,)


class AgentError(Exception):
    """The user's code failed; the message holds its traceback."""
