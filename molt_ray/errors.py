"""What ends a run, as opposed to a bug: the message alone tells a user why and what to do."""


class RunError(RuntimeError):
    """A run that cannot start or go on."""
