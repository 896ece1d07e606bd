"""How the command line ends."""

import enum

__all__ = ["Exit", "ProgramError", "reason"]


class Exit(enum.IntEnum):
    """The exit codes of the program."""

    DONE = 0
    INTERNAL = 1
    UNUSABLE = 2
    NO_ANSWER = 3
    NOT_WRITTEN = 4
    PROCESS_LOST = 5
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """What the code says."""
        return {
            Exit.DONE: "done",
            Exit.INTERNAL: "an error in jaxcmle itself, or out of memory",
            Exit.UNUSABLE: "arguments or data that cannot be used",
            Exit.NO_ANSWER: "no admissible answer, or a guarantee that takes too many candidates",
            Exit.NOT_WRITTEN: "an output could not be written",
            Exit.PROCESS_LOST: "another process of --distributed has ended",
            Exit.INTERRUPTED: "Ctrl-C; the best found by then is printed and written",
        }[self]


class ProgramError(Exception):
    """Ends the program: a line for the user, and an exit code."""

    def __init__(self, message: str, code: Exit = Exit.UNUSABLE) -> None:
        """Say what is wrong."""
        super().__init__(message)
        self.code = code


def reason(error: OSError) -> str:
    """Return what the system says is wrong with a file."""
    return (error.strerror or str(error)).lower()
