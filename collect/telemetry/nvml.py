"""NVML through nvidia-ml-py (module `pynvml`): the library, opened, and its errors as `Refused`."""

from collections.abc import Sequence
from typing import Any, Final

from dynamiccl.collect.telemetry.collectors import Refused

#: nvmlReturn_t (nvml.h) after which asking again is of no use: not supported, no permission, driver
#: not loaded, no library, no such function, GPU lost, library and driver differ, deprecated.
_LASTING: Final = frozenset({3, 4, 9, 12, 13, 15, 18, 26})
#: nvmlReturn_t that say "ask in another way": not supported, no such function, deprecated.
_OTHER_WAY: Final = frozenset({3, 13, 26})
#: nvmlValueType_t (nvml.h) -> member of the union that holds a field's value.
_MEMBER: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

#: (function, arguments after the device handle) of pynvml.
Call = tuple[str, tuple[int, ...]]


class Nvml:
    """The library after `nvmlInit`."""

    def __init__(self) -> None:
        """Import and initialise; raises Refused without the package, the driver or the right."""
        try:
            import pynvml
        except ImportError as error:
            raise Refused(
                "no package nvidia-ml-py; pip install 'dynamiccl[telemetry]'", lasting=True
            ) from error
        self._lib: Any = pynvml
        self.ask("nvmlInit")
        #: GPUs that the driver shows; a broken one counts, and refuses its handle.
        self.num_gpus: int = self.ask("nvmlDeviceGetCount")

    def handle(self, index: int) -> Any:
        """What NVML knows GPU number `index` by; raises Refused."""
        return self.ask("nvmlDeviceGetHandleByIndex", index)

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function of pynvml; raises Refused."""
        try:
            return getattr(self._lib, function)(*arguments)
        except AttributeError as error:
            raise Refused(f"nvidia-ml-py has no {function}", lasting=True) from error
        except self._lib.NVMLError as error:
            raise Refused(f"{function}: {error}", lasting=error.value in _LASTING) from error

    def first_way(self, handle: Any, ways: Sequence[Call]) -> Call:
        """The first of `ways` that this driver knows, else the last one."""
        for function, arguments in ways[:-1]:
            try:
                getattr(self._lib, function)(handle, *arguments)
            except AttributeError:
                continue
            except self._lib.NVMLError as error:
                if error.value in _OTHER_WAY:
                    continue
            return function, arguments
        return ways[-1]

    def fields(self, handle: Any, wanted: Sequence[tuple[int, int]]) -> list[float | str]:
        """Values of (field id, scope), or the error where there is none; raises Refused."""
        raw = self.ask("nvmlDeviceGetFieldValues", handle, wanted)
        return [self._field(value) for value in raw]

    def _field(self, value: Any) -> float | str:
        if value.nvmlReturn != 0:
            return f"field {value.fieldId}: {self._lib.NVMLError(value.nvmlReturn)}"
        number: float = getattr(value.value, _MEMBER[value.valueType])
        return number

    def close(self) -> None:
        """Give the library back."""
        self.ask("nvmlShutdown")
