"""The whole pipeline in one go: `make demo`.

Measured data in, a simulated sweep beside it, a policy trained, scored and exported, the plugin
built and asked through NCCL's tuner ABI. Every step is the command that a user would type; only the
last one, which plays NCCL's part, is a call from here.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from dynamiccl.libraries import BUILD_DIR, TUNER_NAME
from dynamiccl.nccl import ABSTAIN, Collective, Config
from dynamiccl.simulator.h100 import default_model, true_us
from dynamiccl.simulator.system import Call, Group
from dynamiccl.sizes import bin_center_bytes, size_label

ROOT: Final = Path(__file__).resolve().parent.parent
SYSTEM: Final = "h100-ib-simulated"
GROUP: Final = Group(num_nodes=4, ranks_per_node=8)
#: 20 sizes over the range in which NCCL's choices change, test bins among them.
SIZES: Final = [bin_center_bytes(4 * octave) for octave in range(12, 32)]
console = Console(width=100)


def command(program: str, *arguments: str, parse: bool = False) -> Any:
    """Run one of our commands, showing it; return its JSON when `parse`."""
    words = [f"dynamiccl-{program}", *arguments]
    console.print(f"$ {' '.join(words)}", style="bold", soft_wrap=True, highlight=False)
    executable = str(Path(sys.executable).parent / words[0])
    if not parse:
        subprocess.run([executable, *arguments], check=True)
        return None
    words = [executable, *arguments, "--json"]
    return json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out: Path = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    started = time.monotonic()
    data, tracking = out / "data", f"sqlite:///{out / 'mlflow.db'}"
    os.environ["MLFLOW_TRACKING_URI"] = tracking

    sample = ROOT / "datasets" / "sample"
    files = [str(path) for path in sorted(sample.glob("*.csv"))]
    systems = ("--systems", str(sample / "systems.toml"))
    imported = command("collect", "import", *files, "--out", str(data), *systems, parse=True)
    sweep = str(ROOT / "examples" / "h100_4x8.toml")
    simulated = command(
        "collect", "run", sweep, "--runner", "simulator", "--out", str(data), parse=True
    )
    command("collect", "describe", str(data))
    seed = str(arguments.seed)
    fitted = command("train", "fit", "--data", str(data), "--seed", seed, parse=True)
    run = fitted["run_directory"]
    report = command(
        "evaluate", "report", "--data", str(data), "--policy", fitted["run_id"],
        "--out", str(out / "report"), parse=True,
    )  # fmt: skip
    artifact = out / "artifact"
    command("deploy", "export", run, "--out", str(artifact))
    console.print("$ python -m dynamiccl.serve.build", style="bold")
    plugin = ROOT / BUILD_DIR / TUNER_NAME
    build = [sys.executable, "-m", "dynamiccl.serve.build", "--dir", str(plugin.parent)]
    subprocess.run(build, check=True, cwd=ROOT)

    answers = ask(plugin, artifact)
    show_worth(report)
    show_answers(answers)
    summary = {
        "rows_imported": imported["measurements_written"],
        "rows_simulated": simulated["rows_written"],
        "training": {key: fitted[key] for key in ("recipe", "steps", "seconds")},
        "time_saved": time_saved(report),
        "artifact": str(artifact),
        "plugin_answers": answers,
        "report": report["page"],
        "seconds": round(time.monotonic() - started, 1),
    }
    path = out / "summary.json"
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    ended = [
        f"\nreport   {report['page']}",
        f"figures  {path}",
        f"runs     mlflow ui --backend-store-uri {tracking}",
        f"done in {summary['seconds']} s; with your own data: docs/start.md",
        "\nAgainst NCCL's own choice, at sizes that the policy never saw:",
    ]
    console.print("\n".join(ended), soft_wrap=True, highlight=False)
    for system, found in report["systems"].items():
        name = f"{system} (simulated)" if found["simulated"] else f"{system} (measured)"
        for sentence in found["sentences"].values():
            console.print(f"- {name}: {sentence}.", highlight=False)
    console.print(f"\n{in_one_sentence(answers)}", highlight=False)


def ask(plugin: Path, artifact: Path) -> list[dict[str, Any]]:
    """Play NCCL: hand the tuner NCCL's own cost table for each size, and take its argmin after.

    All ranks agree before, as threads of this process.
    """
    sys.path.append(str(ROOT))
    from tests.serve.abi import TunerPlugin, loopback_environment

    environment = loopback_environment(artifact, SYSTEM)
    answers = []
    tuner = TunerPlugin(plugin)
    with tuner.communicator(
        GROUP.num_ranks, GROUP.num_nodes, version=5, environment=environment, all_ranks=True
    ) as communicator:
        for size in SIZES:
            call = Call(GROUP, Collective.AllReduce, size)
            answer = communicator.ask(call.collective, size, default_model().cost_table(call))
            chosen = default_model().resolve(call, ABSTAIN)
            default = Config(chosen.algorithm, chosen.protocol)
            ours = answer.config
            times = [
                true_us(call, (c.algorithm, c.protocol))
                for c in (default, ours)
                if c.algorithm is not None and c.protocol is not None
            ]
            answers.append(
                {
                    "size": size,
                    "nccl_config": default.key,
                    "config": ours.key,
                    "acted": answer.acted,
                    "nccl_time_us": round(times[0], 1),
                    "time_us": round(times[1], 1),
                }
            )
    return answers


def in_one_sentence(answers: list[dict[str, Any]]) -> str:
    """What came of it: where the plugin chose otherwise than NCCL, and what that was worth."""
    ratios = [each["time_us"] / each["nccl_time_us"] for each in answers]
    others = [each for each in answers if each["config"] != each["nccl_config"]]
    slower = sum(ratio > 1.0 for ratio in ratios)
    best = min(answers, key=lambda each: each["time_us"] / each["nccl_time_us"])
    saved = 1.0 - best["time_us"] / best["nccl_time_us"]
    return (
        f"The plugin, AllReduce on {GROUP.num_nodes} x {GROUP.ranks_per_node} H100 (simulated): "
        f"another config than NCCL's at {len(others)} of {len(answers)} sizes, "
        f"{1.0 - sum(ratios) / len(ratios):.1%} less time in the mean of the sizes, at most "
        f"{saved:.1%} (at {size_label(best['size'])}: {best['config']} for {best['nccl_config']}), "
        f"and slower at {slower}."
    )


def time_saved(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """System -> policy -> the share of NCCL's own time that it saves on held-out sizes."""
    return {
        system: {name: figures["gain"] for name, figures in found["policies"].items()}
        for system, found in report["systems"].items()
    }


def show_worth(report: dict[str, Any]) -> None:
    """Print time saved by system and policy, and the verdicts in words."""
    saved, systems = time_saved(report), report["systems"]
    heads = [
        f"{name}{' (simulated)' if found['simulated'] else ''}" for name, found in systems.items()
    ]
    title = "Time saved against NCCL's own choice, on held-out sizes"
    table = Table("who decides", *heads, title=title)
    for policy in next(iter(saved.values())):
        table.add_row(policy, *(f"{100 * gains[policy]:.1f} %" for gains in saved.values()))
    bands = [
        ", ".join(f"{n} {100 * band:.1f} %" for n, band in found["noise_bands"].items())
        or "unknown"
        for found in systems.values()
    ]
    table.add_row("noise band", *bands)
    console.print(table)
    for found in systems.values():
        for verdict in found["verdicts"]:
            console.print(f"- {verdict}", highlight=False)


def show_answers(answers: list[dict[str, Any]]) -> None:
    """Print what NCCL and what the plugin chose, with the simulated time of both."""
    title = (
        f"AllReduce, {GROUP.num_nodes} x {GROUP.ranks_per_node} H100 (simulated), asked by v5 ABI"
    )
    table = Table("size", "NCCL's choice", "us", "through the plugin", "us", "saved", title=title)
    for answer in answers:
        saved = 1.0 - answer["time_us"] / answer["nccl_time_us"]
        table.add_row(
            size_label(answer["size"]),
            answer["nccl_config"],
            f"{answer['nccl_time_us']:.1f}",
            answer["config"] if answer["acted"] else f"{answer['config']} (left to NCCL)",
            f"{answer['time_us']:.1f}",
            f"{saved:.1%}" if answer["config"] != answer["nccl_config"] else "",
        )
    console.print(table)


if __name__ == "__main__":
    main()
