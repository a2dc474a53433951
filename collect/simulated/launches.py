"""Launch profiles and interference in the simulator: NCCL_NTHREADS, transport, slowdowns."""

from collections.abc import Mapping

from dynamiccl.collect.sweep.trial import SIMULATED, Interference, LaunchProfile
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.errors import InvalidSweep, UserError
from dynamiccl.nccl import Transport
from dynamiccl.simulator.parametric import ParametricSystem
from dynamiccl.simulator.parts import QUIET, Surroundings
from dynamiccl.simulator.system import UNTOUCHED, Launch, System

_THREADS = "NCCL_NTHREADS"
_NO_P2P = "NCCL_P2P_DISABLE"
_NO_SHM = "NCCL_SHM_DISABLE"
_MODELLED = (_THREADS, _NO_P2P, _NO_SHM)


def launch_of(profile: LaunchProfile, system: System) -> Launch:
    """The launch settings that a profile fixes on `system`.

    Raises InvalidSweep for a system without launch settings, for a variable that is not modelled,
    and for a transport or a number of threads that the system has no parameters for.
    """
    if profile.name == DEFAULT_PROFILE:
        return UNTOUCHED
    if not isinstance(system, ParametricSystem):
        raise InvalidSweep(
            f"the simulator knows no launch profiles of '{system.name}': remove '{profile.name}'"
        )
    environment = dict(profile.environment)
    unknown = [name for name in environment if name not in _MODELLED]
    if unknown:
        raise InvalidSweep(
            f"profile '{profile.name}' sets {', '.join(unknown)}, which the simulator does not "
            f"model; it takes threads and transport ({', '.join(_MODELLED)})"
        )
    try:
        launch = Launch(_threads(environment), _transport(environment))
        system.check_launch(launch)
    except (UserError, ValueError) as error:
        raise InvalidSweep(f"profile '{profile.name}': {error}") from error
    return launch


def surroundings_of(interference: Interference) -> Surroundings:
    """The network slowdown of a congestion level; other kinds of interference have none."""
    if interference.kind not in SIMULATED:
        return QUIET
    slower = 1.0 + interference.level
    return Surroundings(intra=slower, inter=slower)


def _threads(environment: Mapping[str, str]) -> int | None:
    return int(environment[_THREADS]) if _THREADS in environment else None


def _transport(environment: Mapping[str, str]) -> Transport | None:
    if environment.get(_NO_P2P) != "1":
        return None
    return Transport.NET if environment.get(_NO_SHM) == "1" else Transport.SHM
