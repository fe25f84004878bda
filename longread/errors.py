"""The exception tree: one class for each exit code, and a message that is what the user sees."""


class LongreadError(Exception):
    """Base of every error a user can cause or meet; the message says what to do next."""

    exit_code = 1


class UsageError(LongreadError):
    """The command line or a setting makes no sense."""

    exit_code = 2


class DocumentError(LongreadError):
    """A document is missing, damaged, or not of a kind that can be read."""

    exit_code = 3


class PasswordError(DocumentError):
    """A document needs a password, or the one given is wrong."""

    exit_code = 4


class NoTextError(DocumentError):
    """A document opened but holds no text."""

    exit_code = 5


class ContextError(LongreadError):
    """Document, question and answer do not fit the model's window."""

    exit_code = 6


class ModelError(LongreadError):
    """A model or device cannot be found, fetched, verified, converted or run."""

    exit_code = 7


class StoreError(LongreadError):
    """The cache directory cannot be read, written or locked."""

    exit_code = 8


class InterruptedByUser(LongreadError):
    """Ctrl-C before an answer was complete."""

    exit_code = 130
