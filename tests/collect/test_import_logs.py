"""Recorded outputs of nccl-tests, whole: every row is found, and nothing else is.

The rows of each file were counted by hand and with `grep -cE` over the row pattern, before there
was a parser; the numbers of the data's own README agree. It says two rows of size 0 for all six
superbenchmark files; three of them have five, since AllGather, ReduceScatter and AlltoAll round the
size down per rank.
"""

from pathlib import Path

import pytest

from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.datasets import store
from dynamiccl.errors import OutputError
from tests.published import folder, published

LOGS = folder("logs")

#: Rows, rows of size 0, collective, ranks, nodes.
WHOLE = {
    "abci_allreduce_inter_anode_job02.7194279.nccl.log": (24, 0, "AllReduce", 16, 2),
    "abci_allreduce_inter_anode_job04.7194285.nccl.log": (24, 0, "AllReduce", 32, 4),
    "abci_allreduce_inter_anode_job08.7194286.nccl.log": (24, 0, "AllReduce", 64, 8),
    "abci_allreduce_inter_vnode_job02.7194532.nccl.log": (24, 0, "AllReduce", 8, 2),
    "abci_allreduce_inter_vnode_job04.7194533.nccl.log": (24, 0, "AllReduce", 16, 4),
    "abci_allreduce_inter_vnode_job08.7194534.nccl.log": (24, 0, "AllReduce", 32, 8),
    "abci_allreduce_intra_anode_job04.7280520.nccl.log": (24, 0, "AllReduce", 4, 1),
    "abci_allreduce_intra_anode_job08.7280517.nccl.log": (24, 0, "AllReduce", 8, 1),
    "abci_allreduce_intra_vnode_job04.7280532.nccl.log": (24, 0, "AllReduce", 4, 1),
    "aws_efa_eks_p4d_tag_output_info_mixed.log": (30, 0, "AllReduce", 16, 2),
    "cscs_gh200_2ranks_v2.18.2.log": (8, 0, "AllReduce", 2, 2),
    # Two ranks on one GPU (a host id for each): how many nodes NCCL saw is not in the output.
    "ebpf_allgather_ll_large_cut.log": (2, 0, "AllGather", 2, None),
    "ebpf_allgather_ll_small.log": (3, 0, "AllGather", 2, None),
    "ebpf_allgather_tag_output_proto_simple.log": (8, 0, "AllGather", 2, None),
    "ebpf_allgather_three_runs_in_one_file.log": (24, 0, "AllGather", 2, None),
    "ebpf_allgather_trimmed_header.log": (8, 0, "AllGather", 2, None),
    "ebpf_allreduce_ll_collapse.log": (4, 0, "AllReduce", 2, None),
    "ebpf_allreduce_one_row_byte_step.log": (1, 0, "AllReduce", 2, None),
    "ebpf_allreduce_tag_output_stderr_mixed.log": (8, 0, "AllReduce", 2, None),
    "ebpf_allreduce_trimmed_header.log": (25, 0, "AllReduce", 2, None),
    "ebpf_broadcast_default_v2.18.log": (9, 0, "Broadcast", 2, None),
    "ebpf_broadcast_ll_rep1.log": (18, 0, "Broadcast", 2, None),
    "ebpf_one_rank_no_header.log": (12, 0, "AllReduce", 1, 1),
    "ebpf_shm_allreduce_tree_simple_rep1.log": (25, 0, "AllReduce", 2, None),
    "eks_p5_two_runs_tag_output_info.log": (2, 0, "AllReduce", None, None),
    "oci_a100_2x8_one_row_10g.log": (1, 0, "AllReduce", 16, 2),
    "playground_a100_sendrecv.log": (4, 0, "SendRecv", None, None),
    "superbenchmark_allgather.log": (34, 5, "AllGather", 8, 1),
    "superbenchmark_allreduce.log": (34, 2, "AllReduce", 8, 1),
    "superbenchmark_alltoall.log": (34, 5, "AlltoAll", 8, 1),
    "superbenchmark_broadcast.log": (34, 2, "Broadcast", 8, 1),
    "superbenchmark_reduce.log": (34, 2, "Reduce", 8, 1),
    "superbenchmark_reducescatter.log": (34, 5, "ReduceScatter", 8, 1),
}
#: One half only: size, time, algbw, busbw.
UNDERSCORES = "ml_engineering_a100_underscore_sizes.log"
#: File, what the error must say.
WITHOUT_ROWS = {
    "a10g_pat_ll128_invalid.log": ":14: no benchmark row; the run failed: Error : no algorithm",
    "ebpf_nccl_failure_internal.log": ":3: no benchmark row; .* 'internal error'",
    "ebpf_nccl_failure_only.log": ":2: no benchmark row; .* common.cu:210 'invalid usage'",
    # A table of a torch script, in markdown and with units: not nccl-tests, and not read as it.
    "ml_engineering_h200_torch_bench_table.log": "no row of nccl-tests",
}
#: NCCL's log of a run: it has NCCL's own cost model, and no row of a benchmark.
COMPANION = "ebpf_broadcast_default_v2.18.nccl_debug.log"
OPTIONS = ImportOptions(system="testbed")


def test_every_log_has_an_expectation() -> None:
    expected = {*WHOLE, UNDERSCORES, COMPANION, *WITHOUT_ROWS}
    assert {path.name for path in LOGS.iterdir()} == expected & {p.name for p in LOGS.iterdir()}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_output(name: str, tmp_path: Path) -> None:
    rows, empty, collective, ranks, nodes = WHOLE[name]
    summary = import_files([published(LOGS / name)], tmp_path, options=OPTIONS)
    frame = store.read(tmp_path)
    assert summary.rows_read == rows
    assert summary.dropped == empty
    assert summary.rejected == []
    assert summary.measurements_written == frame.height == 2 * (rows - empty)
    assert frame["in_place"].sum() == rows - empty
    facts = frame.select("collective", "num_ranks", "num_nodes").unique().rows()
    assert facts == [(collective, ranks, nodes)]
    assert frame["status"].unique().to_list() == ["ok"]
    assert frame.select("trial", "run", "repeat").is_unique().all()


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_output_without_a_row_is_an_error_that_says_why(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=WITHOUT_ROWS[name]) as caught:
        import_files([published(LOGS / name)], tmp_path, options=OPTIONS)
    assert caught.value.exit_code == 3
    assert name in str(caught.value)
