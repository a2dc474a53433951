"""NVML through nvidia-ml-py (module `pynvml`); its errors are raised as `Refused`."""

from typing import Any


class Refused(Exception):
    """Raised when NVML is missing or returns an error; the message says why."""


class Nvml:
    """The library after `nvmlInit`."""

    def __init__(self) -> None:
        """Import and initialise; raises Refused without the package, the driver or the right."""
        try:
            import pynvml
        except ImportError as error:
            raise Refused("no package nvidia-ml-py; pip install 'dynamiccl[telemetry]'") from error
        self._lib: Any = pynvml
        self.ask("nvmlInit")
        #: GPUs that the driver shows; a broken one counts, and refuses its handle.
        self.num_gpus: int = self.ask("nvmlDeviceGetCount")

    def handle(self, index: int) -> Any:
        """NVML's handle of GPU number `index`; raises Refused."""
        return self.ask("nvmlDeviceGetHandleByIndex", index)

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function of pynvml; raises Refused."""
        try:
            return getattr(self._lib, function)(*arguments)
        except AttributeError as error:
            raise Refused(f"nvidia-ml-py has no {function}") from error
        except self._lib.NVMLError as error:
            raise Refused(f"{function}: {error}") from error

    def close(self) -> None:
        """Call `nvmlShutdown`."""
        self.ask("nvmlShutdown")
