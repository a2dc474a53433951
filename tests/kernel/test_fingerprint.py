import pytest

from dynamiccl.errors import UserError
from dynamiccl.fingerprint import check_fingerprint, node_part, with_nccl
from dynamiccl.nccl import NcclVersion

H100 = "gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8;nccl=22809"


def test_models_are_counted_and_sorted() -> None:
    node = node_part(["B", "A", "B"], mig=True, nic_kind="socket", num_nics=1)
    assert node == "gpu=A*1+B*2;mig=1;nic=socket*1"
    assert check_fingerprint(with_nccl(node, NcclVersion(2, 28, 9))).endswith(";nccl=22809")


@pytest.mark.parametrize("text", [H100, "gpu=none*0;mig=0;nic=none*0;nccl=0"])
def test_fingerprint_is_taken_as_it_is(text: str) -> None:
    assert check_fingerprint(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "H100",
        H100.replace(";", "\t"),
        H100 + "\n",
        H100.replace("mig=0", "mig=2"),
        H100.replace("*8;mig", ";mig"),
        H100.replace("22809", "2.28.9"),
        H100.replace("NVIDIA", "N" * 160),
        H100.replace("NVIDIA", "\x07"),
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match="one looks like 'gpu=NVIDIA H100"):
        check_fingerprint(text)
