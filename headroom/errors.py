"""Errors that a user can act on: what is wrong, with the numbers, then what to try."""


class HeadroomError(Exception):
    """Base of every error that the user can correct; `hint` says what to try."""

    def __init__(self, message: str, *, hint: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param  # the request field or setting at fault, if there is one

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class FormatError(HeadroomError):
    """A file cannot be read: missing, truncated, corrupt or of an unknown format."""


class ModelError(HeadroomError):
    """A checkpoint is readable but is not a model that can be run."""


class OptionError(HeadroomError):
    """A setting has a value that it cannot have, or does not exist."""


class PlanError(HeadroomError):
    """A model does not fit the devices with the settings that were fixed."""


class KernelError(HeadroomError):
    """No kernel runs an operation on a device."""


class DeviceError(HeadroomError):
    """A device of this machine cannot run: its driver, its age, or too little free memory."""


class RequestError(HeadroomError):
    """A request is wrong: a value out of range, a prompt longer than the context."""


class ContextLengthError(RequestError):
    """A prompt leaves no room for an answer in the context."""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        param: str | None = None,
        tokens: int = 0,  # of the prompt
        context: int = 0,  # tokens of prompt and answer together
    ) -> None:
        super().__init__(message, hint=hint, param=param)
        self.tokens = tokens
        self.context = context


class CapacityError(HeadroomError):
    """A request is right but cannot be taken now: the queue is full or memory is short."""


# How the CUDA driver, torch and its libraries say that GPU memory (or pinned memory) is full.
# cuBLAS says "not initialized" if it finds no memory when it starts. "can't allocate memory" is not
# in the list: torch says that of plain host memory.
_OUT_OF_MEMORY = (
    *("out of memory", "outofmemory", "status_alloc_failed"),
    "cublas_status_not_initialized",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or an error that caused it, says that GPU or pinned memory is full.

    Our own kernels report the driver's words in a KernelError; torch raises a class of its own or a
    plain RuntimeError; an error at the end of a graph capture hides the one that spoiled it.
    """
    while error is not None:
        text = f"{type(error).__name__} {error}".lower()
        if isinstance(error, RuntimeError | KernelError) and any(x in text for x in _OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False
