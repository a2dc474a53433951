"""System files: what they say of every number, and how wrong ones are refused."""

from pathlib import Path

import pytest

from dynamiccl.errors import DynamicclError, MissingPath, UnknownName, UserError
from dynamiccl.nccl import Transport
from dynamiccl.simulator.system import Launch
from dynamiccl.simulator.systems import (
    CELL_NUMBERS,
    LINK_NUMBERS,
    PARAMETRIC,
    Origin,
    ParametricSystem,
    SystemFile,
    find_system,
    system_file,
    system_text,
)
from dynamiccl.simulator.toml_table import parse_toml

TEXT = system_text(system_file("b300-nvlink"))


@pytest.mark.parametrize("name", PARAMETRIC)
def test_text_of_a_file_says_what_the_file_says(name: str) -> None:
    file = system_file(name)
    text = system_text(file, head="by hand\n\nand twice")
    assert parse_toml(SystemFile, text, where="x") == file


@pytest.mark.parametrize("name", PARAMETRIC)
def test_fitted_numbers_are_in_fitted_systems_only(name: str) -> None:
    file = system_file(name)
    origins = {getattr(file.links, number).origin for number in LINK_NUMBERS}
    origins |= {getattr(cell, number).origin for cell in file.cells for number in CELL_NUMBERS}
    assert (Origin.FITTED in origins) == (file.kind == "fitted")


@pytest.mark.parametrize("name", PARAMETRIC)
def test_threads_chunks_and_transports_are_priors(name: str) -> None:
    file = system_file(name)
    tables = [file.threads, file.chunks, *file.transports.values()]
    numbers = [
        getattr(table, key)
        for table in tables
        for key, field in type(table).model_fields.items()
        if field.annotation is not int
    ]
    assert len(numbers) >= 6
    assert {number.origin for number in numbers} == {Origin.PRIOR}


def test_a_file_of_one_s_own_is_found_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace('name = "b300-nvlink"', 'name = "mine"'), encoding="utf-8")
    assert find_system(str(path)).name == "mine"
    assert system_file("gb10-roce").name == "gb10-roce"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('origin = "fitted"', 'origin = "measured"', "'fitted', 'published' or 'prior'"),
        ("per_s = { value = ", "per_s = { value = -", "links.inside_gbytes_per_s.value"),
        ('algorithm = "Tree"', 'algorithm = "Trie"', "unknown algorithm 'Trie'"),
        ('protocol = "LL128"', 'protocol = "LL"', "cell Ring/LL stands there twice"),
        ("num_sms = 148", "num_smss = 148", "num_sms"),
        ('machine = "b300"', 'machine = "b301"', "unknown machine 'b301'"),
        ('nccl_version = "2.29.7"', 'nccl_version = "new"', "unknown NCCL version 'new'"),
        ("num_sms = 148", "num_sms = ", "is not TOML"),
        ('name = "b300-nvlink"', 'name = "B 300"', "B 300"),
    ],
)
def test_a_wrong_file_is_refused_with_key_and_value(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    assert old in TEXT
    path = tmp_path / "wrong.toml"
    path.write_text(TEXT.replace(old, new), encoding="utf-8")
    with pytest.raises(DynamicclError) as refused:
        find_system(str(path))
    assert said in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_file_that_is_not_there_and_a_name_that_nobody_has() -> None:
    with pytest.raises(MissingPath, match=r"no system file at nowhere\.toml"):
        find_system("nowhere.toml")
    with pytest.raises(UnknownName, match=r"'b200-nvlink'.*did you mean 'b300-nvlink'"):
        system_file("b200-nvlink")


def test_a_transport_without_figures_is_refused_with_those_that_have_some() -> None:
    system = find_system("b300-nvlink")
    assert isinstance(system, ParametricSystem)
    bare = ParametricSystem(system.file.model_copy(update={"transports": {}}))
    with pytest.raises(UserError, match="'b300-nvlink' has no transport SHM; it has P2P"):
        bare.check_launch(Launch(transport=Transport.SHM))
