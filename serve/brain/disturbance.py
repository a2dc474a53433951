"""Detects interference on a task key, by the artifact's Trigger or by levels in the calls."""

from dynamiccl.datasets.history import Call
from dynamiccl.datasets.manifest import TRIGGER_NAME
from dynamiccl.nccl import Collective
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.brain.search_context import num_new_calls
from dynamiccl.serve.brain_history import KeyCalls
from dynamiccl.serve.search.tuner import is_disturbed
from dynamiccl.serve.torchscript import ScriptedTrigger


class Disturbance:
    """The interference state of one communicator's task keys."""

    def __init__(self, artifact: Artifact) -> None:
        """Take the artifact's Trigger, where it has one."""
        path = artifact.directory / TRIGGER_NAME
        self._trigger = ScriptedTrigger(path) if path.is_file() else None
        self._seen: dict[tuple[Collective, int], tuple[Call, ...]] = {}
        self._is_disturbed: dict[tuple[Collective, int], bool] = {}

    def has_changed(self, task: KeyCalls) -> bool:
        """Whether new calls show that interference on the task key began or ended."""
        key = (task.collective, task.bin)
        fresh = num_new_calls(self._seen.get(key, ()), task.calls)
        self._seen[key] = task.calls
        before = self._is_disturbed.get(key, False)
        for call in task.calls[len(task.calls) - fresh :]:
            self._is_disturbed[key] = self._after(key, call)
        return self._is_disturbed.get(key, False) != before

    def _after(self, key: tuple[Collective, int], call: Call) -> bool:
        before = self._is_disturbed.get(key, False)
        level = call.interference
        if self._trigger is not None:
            stream = (*key, call.algorithm, call.protocol, call.num_channels)
            level = self._trigger.tell(key, stream, call.time_us, call.size_bytes)
        return before if level is None else is_disturbed(level, before=before)
