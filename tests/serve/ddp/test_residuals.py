import pytest
import torch

from dynamiccl.errors import UserError
from dynamiccl.serve.ddp.residuals import Piece, Residuals

CPU = torch.device("cpu")
A, B, C = Piece("a", 2), Piece("b", 3), Piece("c", 1)


def filled() -> Residuals:
    residuals = Residuals()
    residuals.of((A, B), CPU).copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    residuals.of((C,), CPU).fill_(6.0)
    return residuals


def test_error_feedback_follows_its_parameters_into_new_buckets() -> None:
    residuals = filled()
    assert residuals.of((C, B), CPU).tolist() == [6.0, 3.0, 4.0, 5.0]
    assert residuals.of((A,), CPU).tolist() == [1.0, 2.0]


def test_a_checkpoint_may_be_loaded_into_other_buckets() -> None:
    again = Residuals()
    again.restore(filled().state(), {"a": 2, "b": 3, "c": 1})
    assert again.of((B, A, C), CPU).tolist() == [3.0, 4.0, 5.0, 1.0, 2.0, 6.0]


def test_a_checkpoint_of_another_model_is_refused() -> None:
    with pytest.raises(UserError, match="parameter 'b' has 3 values, the model's has 7"):
        Residuals().restore(filled().state(), {"a": 2, "b": 7, "c": 1})


def test_what_is_taken_is_owed_no_more() -> None:
    residuals = filled()
    assert set(residuals.state()) == {"a", "b", "c"}
    before = residuals.state()["a"]
    taken = residuals.take((A,), CPU)
    assert taken is not None
    assert torch.equal(taken, before)
    assert residuals.take((A,), CPU) is None
    assert set(residuals.state()) == {"b", "c"}  # of other buckets nothing is lost
    assert Residuals().take((A,), CPU) is None
