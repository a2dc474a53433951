import json
from functools import partial

import pytest

from dynamiccl import cli, errors

FAMILIES = {
    errors.UserError: 2,
    errors.DataError: 3,
    errors.MachineError: 4,
    errors.Interrupted: 130,
}


def below(kind: type[errors.DynamicclError]) -> list[type[errors.DynamicclError]]:
    return [one for sub in kind.__subclasses__() for one in (sub, *below(sub))]


def test_every_error_has_the_exit_code_of_its_family() -> None:
    assert len(below(errors.DynamicclError)) >= 12
    for kind in below(errors.DynamicclError):
        codes = [code for family, code in FAMILIES.items() if family in kind.__mro__]
        assert codes == [kind.exit_code], kind


def test_a_users_error_is_one_line_and_ours_not_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(with_: Exception) -> None:
        raise with_

    with pytest.raises(SystemExit) as caught:
        cli.run(partial(fail, errors.UnknownName("system", "a", [])))
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", "error: unknown system 'a'; choose from none exist\n")
    cli.run(lambda: None)  # one that works says nothing
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ZeroDivisionError):
        cli.run(partial(fail, ZeroDivisionError()))


def test_json_refuses_what_machines_cannot_read(capsys: pytest.CaptureFixture[str]) -> None:
    cli.print_json({"b": [1, None], "a": "x"})
    assert json.loads(capsys.readouterr().out) == {"b": [1, None], "a": "x"}
    with pytest.raises(ValueError, match="JSON compliant"):
        cli.print_json({"a": float("nan")})
