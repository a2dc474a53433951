"""The hook in real DDP jobs over gloo, as its page shows it too; a job stands above its tests."""

import io
import os
import pickle
import random
import re
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamiccl.errors import UserError
from dynamiccl.serve import ddp
from dynamiccl.serve.ddp import HostClock, NetSense, Settings, netsense_hook
from dynamiccl.serve.ddp.compression import Residuals
from dynamiccl.serve.ddp.laws import Mode

#: A job of a rank: (rank, arguments) -> what the test looks at.
Job = Callable[[int, Any], Any]
JOB_LIMIT_S = 120.0
ROOT = str(Path(__file__).resolve().parents[3])


def run_ranks(job: Job, ranks: int, folder: Path, argument: Any = None) -> list[Any]:
    """What each rank returned; None for a rank that was killed. An exception is the test's."""
    folder.mkdir(parents=True, exist_ok=True)
    context = get_context("forkserver")
    # One import for all ranks of all tests; DDP's constructor wants the second, for two seconds.
    context.set_forkserver_preload(["dynamiccl.serve.ddp", "torch._dynamo.distributed"])
    processes = [
        context.Process(target=_rank, args=(job, rank, ranks, str(folder), argument))
        for rank in range(ranks)
    ]
    with pytest.MonkeyPatch.context() as patch:
        # pytest's importlib mode has no root on the path, and ranks must find `tests`.
        patch.syspath_prepend(ROOT)
        for process in processes:
            process.start()
    for process in processes:
        process.join(JOB_LIMIT_S)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    assert not late, f"{len(late)} of {ranks} ranks were still running after {JOB_LIMIT_S} s"
    found: list[Any] = []
    for rank, process in enumerate(processes):
        path = folder / f"rank-{rank}"
        if process.exitcode == -signal.SIGKILL:
            found.append(None)
            continue
        error, value = pickle.loads(path.read_bytes())
        assert not error, f"rank {rank}: {error}"
        found.append(value)
    return found


def _rank(job: Job, rank: int, ranks: int, folder: str, argument: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place = Path(folder)
    error, value = "", None
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{place / 'meet'}", rank=rank, world_size=ranks
        )
        value = job(rank, argument)
        dist.destroy_process_group()
    except Exception:
        error = traceback.format_exc()
    (place / f"rank-{rank}").write_bytes(pickle.dumps((error, value)))
    # Without this a rank whose peer is gone waits for its group's threads.
    os._exit(0)


def small_model(seed: int = 0, **options: Any) -> DistributedDataParallel:
    """Three layers, 1,410 parameters, in DDP; equal on all ranks."""
    torch.manual_seed(seed)
    layers = [nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)]
    return DistributedDataParallel(nn.Sequential(*layers), **options)


def step_of(model: DistributedDataParallel, rank: int, step: int) -> torch.Tensor:
    """One backward pass on a rank's own numbers of a step; the loss."""
    numbers = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(16, 8, generator=numbers)
    target = inputs[:, :2].sum(1, keepdim=True)
    loss = cast("torch.Tensor", ((model(inputs) - target) ** 2).mean())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def weights(model: DistributedDataParallel) -> torch.Tensor:
    """All parameters, one after the other."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradients(model: DistributedDataParallel) -> torch.Tensor:
    """All gradients, one after the other."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


#: A clock that stands still measures nothing: the ratio stays what it was.
STILL = HostClock(lambda: 0.0)
DENSE = Settings(start_ratio=1.0)
SPARSE = Settings(start_ratio=0.1, shared=True)
BOTH = (SPARSE, replace(SPARSE, shared=False))


CPU = torch.device("cpu")
A, B, C = ("a", 2), ("b", 3), ("c", 1)


PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "ddp-hook.md"


def train(model: DistributedDataParallel, rank: int, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in steps:
        optimizer.zero_grad()
        step_of(model, rank, step)
        optimizer.step()


def with_hook(
    model: DistributedDataParallel, settings: Settings, clock: HostClock | None = STILL
) -> NetSense:
    state = NetSense(model, settings, clock=clock)
    model.register_comm_hook(state, netsense_hook)
    return state


def compare_with_ddp(rank: int, _argument: object) -> list[tuple[bool, float]]:
    found = []
    for cap_mb in (25.0, 0.001):  # one bucket, and several
        plain, ours = small_model(bucket_cap_mb=cap_mb), small_model(bucket_cap_mb=cap_mb)
        state = with_hook(ours, DENSE)
        train(plain, rank, range(5))
        train(ours, rank, range(5))
        same = torch.equal(weights(plain), weights(ours))
        found.append((same, state.stats()["wire_ratio"]))
    return found


def test_at_ratio_one_the_weights_are_those_of_ddp_bit_for_bit(tmp_path: Path) -> None:
    """Three ranks: a third is not a power of two, and multiplying by it is not dividing."""
    assert run_ranks(compare_with_ddp, 3, tmp_path) == [[(True, 1.0)] * 2] * 3


def positions(_rank: int, _argument: object) -> list[bool | None]:
    """Whether they are shared, by optimizer."""
    model, found = small_model(), []
    weights_ = [*model.parameters()]
    for optimizer in (
        None,
        torch.optim.SGD(weights_, 0.1),
        torch.optim.SGD(weights_, 0.1, momentum=0.9),
        torch.optim.Adam(weights_, 0.1),
    ):
        found.append(NetSense(model, optimizer=optimizer).settings.shared)
    wanted = Settings(shared=True)
    return [*found, NetSense(model, wanted, optimizer=optimizer).settings.shared]


def test_positions_are_shared_where_there_is_no_momentum(tmp_path: Path) -> None:
    assert run_ranks(positions, 1, tmp_path) == [[False, True, False, False, True]]
    # A floor of as many bytes as before.
    assert [replace(SPARSE, shared=each).least_ratio for each in (None, True, False)] == [
        0.02,
        0.02,
        0.005,
    ]


def late_momentum(rank: int, wanted: bool | None) -> str:
    """What is said where a scheduler brings momentum after NetSense was made."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = NetSense(model, Settings(shared=wanted), optimizer=optimizer, clock=STILL)
    model.register_comm_hook(state, netsense_hook)
    step_of(model, rank, 0)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    try:
        step_of(model, rank, 1)
    except (RuntimeError, UserError) as error:
        return str(error)
    return ""


def test_momentum_after_shared_positions_is_refused(tmp_path: Path) -> None:
    said = run_ranks(late_momentum, 2, tmp_path / "chosen")
    assert all("has momentum 0.95" in each for each in said)
    assert all("make NetSense after the scheduler" in each for each in said)
    assert run_ranks(late_momentum, 2, tmp_path / "wanted", True) == ["", ""]


def falling_rate(rank: int, _argument: object) -> list[float]:
    """What is owed after a step at a tenth of the rate of the step before, less that step's own."""
    owed = []
    for rate in (0.5, 0.05):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        state = NetSense(model, replace(SPARSE, tr_q=0.0), optimizer=optimizer, clock=STILL)
        model.register_comm_hook(state, netsense_hook)
        step_of(model, rank, 0)
        optimizer.param_groups[0]["lr"] = rate
        state._follow_rate()
        feedback = state.state_dict()["error_feedback"].values()
        owed.append(float(sum(each.abs().sum() for each in feedback)))
    return owed


def test_what_is_owed_is_sent_at_the_rate_of_the_step_that_computed_it(tmp_path: Path) -> None:
    for same, tenth in run_ranks(falling_rate, 2, tmp_path):
        assert tenth == pytest.approx(10.0 * same, rel=1e-4)


def lost_of_two(_rank: int, _argument: object) -> list[str]:
    """The errors of a bucket's result where one of its two collectives fails."""
    state, found = with_hook(small_model(), SPARSE), []
    for which in range(2):
        both: list[torch.futures.Future[Any]] = [torch.futures.Future() for _ in range(2)]
        marks, write = ddp.BucketMarks(0.0), lambda: torch.ones(1)
        result = state._then(marks, write, *both)
        both[which].set_exception(ValueError(f"lost {which}"))
        both[1 - which].set_result(None)
        with pytest.raises((RuntimeError, ValueError)) as error:
            result.wait()
        found.append(str(error.value))
    return found


def test_a_bucket_whose_first_or_second_collective_fails_has_its_error(tmp_path: Path) -> None:
    ((first, second),) = run_ranks(lost_of_two, 1, tmp_path)
    assert "lost 0" in first
    assert "lost 1" in second


def disagreeing_clocks(rank: int, plan: tuple[Mode, int]) -> tuple[list[Any], torch.Tensor]:
    """Each rank's clock has its own rate, offset and jitter, which changes every 20 steps."""
    luck, now, step = random.Random(rank), 1000.0 * rank, 0

    def clock() -> float:
        nonlocal now
        spread = random.Random(step // 20).uniform(0.0, 2.0)
        now += (1.0 + rank) * 10 ** luck.uniform(-spread, spread)
        return now

    mode, steps = plan
    # Whatever else this host sends again would end the start-up; not pytest's process.
    ddp.sent_again = lambda: None
    model = small_model()
    state = with_hook(model, Settings(mode=mode), HostClock(clock))
    seen: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(steps):
        if luck.random() < 0.02:
            time.sleep(luck.uniform(0.0, 0.02))
        optimizer.zero_grad()
        step_of(model, rank, step % 50)
        optimizer.step()
        decision = state._step.decision
        seen.append((decision.method, decision.ratio, decision.quantised, decision.count(1056)))
    return seen, weights(model)


@pytest.mark.parametrize(("mode", "steps"), [("model", 120), ("paper", 60)])
def test_ranks_of_different_clocks_agree(tmp_path: Path, mode: Mode, steps: int) -> None:
    found = run_ranks(disagreeing_clocks, 4, tmp_path, (mode, steps))
    decisions, final = zip(*found, strict=True)
    assert all(each == decisions[0] for each in decisions)
    assert all(torch.equal(each, final[0]) for each in final)
    # There was something to agree on.
    assert len(decisions[0]) == steps
    if mode == "model":
        assert len({method for method, *_ in decisions[0]}) > 1
    else:
        assert len({ratio for _, ratio, *_ in decisions[0]}) > 10


class Branches(nn.Module):
    """Uses one of two layers, by the step: the other one's parameters have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, inputs: torch.Tensor, which: int) -> torch.Tensor:
        found: torch.Tensor = self.layers[2](self.layers[which](inputs))
        return found


def odd_jobs(rank: int, sparse: Settings) -> dict[str, bool]:
    """What DDP allows besides plain steps, sparse and in several buckets; no rank may wait."""
    equal: dict[str, bool] = {}

    accumulating, at_once = small_model(bucket_cap_mb=0.001), small_model(bucket_cap_mb=0.001)
    states = [with_hook(model, sparse) for model in (accumulating, at_once)]
    for step in range(4):
        with accumulating.no_sync():
            step_of(accumulating, rank, 2 * step)
        step_of(accumulating, rank, 2 * step + 1)
    equal["no_sync is no step"] = states[0].stats()["steps"] == 4

    unused = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=0.001)
    with_hook(unused, sparse)
    for step in range(4):
        unused(torch.ones(2, 8) + rank, (step + rank) % 2).sum().backward()
    equal["unused"] = bool(torch.isfinite(gradients(unused)).all())

    autocast = small_model()
    with_hook(autocast, sparse)
    with torch.autocast("cpu", torch.bfloat16):
        train(autocast, rank, range(4))
    equal["autocast"] = bool(torch.isfinite(weights(autocast)).all())

    for name, settings in (("sparse", sparse), ("dense", DENSE)):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Linear(8, 1).bfloat16())
        half = DistributedDataParallel(layers)
        with_hook(half, settings)
        for step in range(3):
            half((torch.ones(2, 8) * (rank + step)).bfloat16()).sum().backward()
        equal[f"bfloat16 {name}"] = gradients(half).dtype == torch.bfloat16

    # Finite values of 16 bits, whose sum has no 16 bits.
    large = DistributedDataParallel(nn.Linear(64, 64, bias=False).half())
    with_hook(large, sparse)
    large(torch.full((1, 64), 1000.0).half()).sum().backward()
    equal["float16"] = bool(torch.isfinite(gradients(large)).all())

    scaled = small_model()
    with_hook(scaled, sparse)
    optimizer = torch.optim.SGD(scaled.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = scaled(torch.ones(2, 8)).sum()
        # One rank alone overflows in one step: all must skip it.
        factor = torch.inf if (rank, step) == (1, 2) else 1.0
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    equal["one overflow"] = scaler.get_scale() == 2.0
    equal["finite after it"] = bool(torch.isfinite(weights(scaled)).all())
    return equal


@pytest.mark.parametrize("sparse", BOTH, ids=["shared", "own"])
def test_all_that_ddp_allows_waits_for_nobody(tmp_path: Path, sparse: Settings) -> None:
    for found in run_ranks(odd_jobs, 2, tmp_path, sparse):
        assert all(found.values()), found


def conserve(rank: int, settings: Settings) -> float:
    """All that was ever computed is either in the sum of means, or still owed."""
    model, alone = small_model(), small_model()
    state = with_hook(model, settings)
    computed, applied = torch.zeros(1410), torch.zeros(1410)
    for step in range(10):
        if step == 5:  # a restart, whose first buckets are others
            checkpoint, model = io.BytesIO(), small_model()
            torch.save(state.state_dict(), checkpoint)
            state = with_hook(model, settings)
            checkpoint.seek(0)
            state.load_state_dict(torch.load(checkpoint, weights_only=True))
        model.zero_grad()
        alone.zero_grad()
        step_of(model, rank, step)
        with alone.no_sync():
            step_of(alone, rank, step)
        computed += gradients(alone)
        applied += gradients(model)
    feedback = state.state_dict()["error_feedback"]
    owed = torch.cat([feedback[n].flatten() for n, _ in model.module.named_parameters()])
    sums = torch.stack([computed, owed])
    torch.distributed.all_reduce(sums)
    return float((applied + sums[1] / 3 - sums[0] / 3).abs().max())


@pytest.mark.parametrize("settings", BOTH, ids=["shared", "own"])
def test_no_gradient_is_lost_in_steps_and_a_checkpoint(tmp_path: Path, settings: Settings) -> None:
    assert max(run_ranks(conserve, 3, tmp_path, settings)) < 1e-5


def killed(rank: int, _argument: object) -> None:
    model = small_model()
    with_hook(model, SPARSE)
    train(model, rank, range(3))
    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        train(model, rank, range(3, 6))


def test_where_a_rank_is_killed_the_others_have_an_error(tmp_path: Path) -> None:
    assert run_ranks(killed, 2, tmp_path) == [None, None]


def with_measured_times(rank: int, _argument: object) -> dict[str, Any]:
    model = small_model()
    with_hook(model, replace(SPARSE, min_ratio=0.01 if rank else 0.02))
    with pytest.raises((RuntimeError, UserError)) as differ:
        step_of(model, rank, 0)
    reported: list[tuple[int, dict[str, float]]] = []
    model = small_model()
    state = NetSense(model, report=lambda stats, step: reported.append((step, stats)))
    model.register_comm_hook(state, netsense_hook)
    train(model, rank, range(8))
    saved = state.state_dict()
    refused = []
    for changed in ({"rank": 5}, {"format": ddp.FORMAT - 1}):
        try:
            state.load_state_dict(saved | changed)
        except UserError as error:
            refused.append(str(error))
    said = str(differ.value)
    return {"reported": reported, "refused": refused, "last": state.stats(), "differ": said}


def test_stats_are_reported_and_strange_checkpoints_refused(tmp_path: Path) -> None:
    found = run_ranks(with_measured_times, 2, tmp_path)
    for each in found:
        assert [step for step, _ in each["reported"]] == list(range(1, 8))
        last = each["reported"][-1][1]
        assert last["wire_bytes"] > 0
        assert last["rtprop_us"] > 0
        assert last["bdp_bytes"] == pytest.approx(
            last["btlbw_gbytes_per_s"] * last["rtprop_us"] * 1e3
        )
        assert "this process has" in each["refused"][0]
        assert "with this release" in each["refused"][1]
        assert "every rank must have the same Settings" in each["differ"]
    # What was agreed is the same on both; what a rank measured itself is its own.
    agreed = [{k: v for k, v in each["last"].items() if not k.startswith("own_")} for each in found]
    assert agreed[0] == agreed[1]


def test_a_bare_model_is_refused() -> None:
    with pytest.raises(UserError, match="not a Linear: wrap the model in it first"):
        NetSense(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_error_feedback_follows_its_parameters_into_new_buckets_and_checkpoints() -> None:
    def filled() -> Residuals:
        residuals = Residuals()
        residuals.of((A, B), CPU).copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        residuals.of((C,), CPU).fill_(6.0)
        return residuals

    moved, again = filled(), Residuals()
    assert moved.of((C, B), CPU).tolist() == [6.0, 3.0, 4.0, 5.0]
    assert moved.of((A,), CPU).tolist() == [1.0, 2.0]
    again.restore(filled().state(), {"a": 2, "b": 3, "c": 1})
    assert again.of((B, A, C), CPU).tolist() == [3.0, 4.0, 5.0, 1.0, 2.0, 6.0]
    with pytest.raises(UserError, match="parameter 'b' has 3 values, the model's has 7"):
        Residuals().restore(filled().state(), {"a": 2, "b": 7, "c": 1})
    # What is taken is owed no more, and of other buckets nothing is lost.
    taken = filled()
    found = taken.take((A,), CPU)
    assert found is not None
    assert found.tolist() == [1.0, 2.0]
    assert taken.take((A,), CPU) is Residuals().take((A,), CPU) is None
    assert {name: kept.tolist() for name, kept in taken.state().items()} == {
        "b": [3.0, 4.0, 5.0],
        "c": [6.0],
    }


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def run_block(rank: int, block: str) -> dict[str, float]:
    model = small_model()
    names: dict[str, Any] = {"model": model}
    exec(block, names)
    for step in range(3):
        step_of(model, rank, step)
    stats: dict[str, float] = names["state"].stats()
    return stats


def test_the_three_lines_of_the_page_train(tmp_path: Path) -> None:
    three = blocks()[0]
    assert len([line for line in three.splitlines() if line]) == 3
    found = run_ranks(run_block, 2, tmp_path, three)
    assert all(stats["steps"] == 3 and stats["wire_bytes"] > 0 for stats in found)
