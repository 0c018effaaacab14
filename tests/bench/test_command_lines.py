"""Command lines and names of drafts: unknown flags and values, flags without effect, and help."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from tyro.conf import UseAppendAction, arg

from bench.draft_flags import ALONE, DraftFlags, drafts_of, parse_draft, written
from common.cli import read
from common.errors import ConfigError
from engine.drafters.combined import Hybrid
from engine.drafters.eagle import EagleConfig
from engine.drafters.self_speculation import SelfConfig
from engine.drafters.suffix import SuffixConfig
from kv_cache.snapkv import SnapKV
from models.names import Dtype
from tests.support.programs import BENCHMARKS, COST_MODEL, TERMINAL, run


@dataclass(frozen=True)
class Inner:
    """Some flags."""

    gammas: tuple[int, ...] = (3,)
    compile: bool = False
    draft: Literal["self", "ngram"] | None = None
    dtype: Literal["auto"] | Dtype = "auto"
    budget: Annotated[int, arg(aliases=["--old_budget"])] = 512


@dataclass(frozen=True)
class Flags:
    """A program's flags."""

    model: str
    axis: UseAppendAction[tuple[str, ...]] = ()
    inner: Inner = field(default_factory=Inner)


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(Flags, argv, "program.py")
    return str(caught.value)


def test_flags_are_the_fields_however_deep():
    assert read(Flags, ["--model", "m"]) == Flags("m")
    given = read(Flags, ["--gammas", "1", "2", "--model=m", "--compile", "--draft", "ngram"])
    assert given == Flags("m", inner=Inner((1, 2), True, "ngram"))
    given = read(Flags, ["--model", "m", "--axis=a=1", "--axis", "a=2", "--gammas", "2", "2", "--old-budget=3"])
    assert given == Flags("m", axis=("a=1", "a=2"), inner=Inner((2, 2), budget=3)), "what is no flag may be repeated"


def test_a_missing_flag_and_an_unknown_choice_are_refused_by_name():
    assert "--model" in refused()
    for choice in ("ngrm", "None"):
        assert choice in refused("--model", "m", "--draft", choice)
    choices = re.search(r"required: (.*)", refused("--model", "m", "--draft", "ngrm"))
    assert choices and choices[1] == "ngram, self"
    for seen, meant in {"bf16": "bfloat16", "half": "float16", "fp32": "float32"}.items():
        error = refused("--model", "m", "--dtype", seen)
        assert error.endswith(f" {meant}") and "auto, bfloat16, float16, float32, float64" in error


@pytest.mark.parametrize("words", ["--budget 64 --old_budget 128", "--budget=64 --budget 64", "--compile --compile"])
def test_a_flag_that_is_given_twice_is_refused(words: str):
    refusal = refused("--model", "m", *words.split())
    assert all(word.partition("=")[0] in refusal for word in words.split() if word.startswith("--"))


@pytest.mark.parametrize(
    ("flags", "useless"),
    [
        ("--p_min 0.5 --text_match 4", ["--p_min", "--text_match"]),
        ("--draft_of_draft ngram --inner_budget 16", ["--inner_budget"]),
        ("--draft ngram --draft_budget 32 --max_ngram 2", ["--draft_budget"]),
        ("--gamma 0 --draft_policy snapkv --draft_budget 64", ["--draft_policy", "--draft_budget"]),
        ("--gamma_schedule confidence --p_min 0.5 --draft_budget 32", []),
    ],
)
def test_a_draft_flag_without_effect_is_a_note(flags: str, useless: list[str], capsys):
    read(DraftFlags, flags.split()).config()
    said = capsys.readouterr().err
    assert said.startswith("note: ") == bool(useless) and len(said.splitlines()) <= 1
    assert sorted(re.findall(r"--\w+", said)) == sorted(useless)


def test_a_token_is_not_repeated():
    for flags in (["--hf_tok", "hf_secret"], ["--hf_token", "hf_secret", "--no_such_flag"], ["hf_secret"]):
        assert "hf_secret" not in run("download.py", flags).refusal


@pytest.mark.parametrize(
    ("program", "words", "named"),
    [
        ("foretoken.py", "compar --gamma 3", ["compar", "compare, eval", "use compare"]),
        ("foretoken.py", "--gamma 3 compare", ["--gamma", "subcommand"]),
        (BENCHMARKS[2], "--drft-budget 128 --gama=3", ["--drft_budget, --gama\n", "use --draft_budget, --gamma,"]),
        (BENCHMARKS[2], "--budget 64 --max_tokens 8", ["--budget", "use --draft_budget, --max_new_tokens,"]),
        (COST_MODEL, "--modl x", ["--modl", "use --model,"]),
        (BENCHMARKS[0], "--B many", ["--batch_size/--B", "many", "integer"]),
        (BENCHMARKS[2], "--confidence_threshold x", ["--confidence_threshold", "seen:     x", "auto"]),
        (BENCHMARKS[2], "--draft_budget 1.5", ["--draft_budget", "1.5", "auto"]),
        (BENCHMARKS[2], "--draft self:streming", ["streming", "snapkv, ", "use streaming"]),
        (BENCHMARKS[2], "--draft_policy streming", ["streming", "snapkv, ", "use streaming"]),
    ],
)
def test_a_misspelt_word_is_named_with_what_is_nearest(program: str, words: str, named: list[str]):
    refusal = run(program, words.split()).refusal
    assert all(word in refusal for word in named) and max(map(len, refusal.splitlines())) < 120, refusal


@pytest.mark.parametrize("program", [*BENCHMARKS, "foretoken.py", *TERMINAL, COST_MODEL])
def test_help_ends_well(program: str):
    ended = run(program, ["--help"])
    assert ended.code == 0 and ended.out.startswith("usage:"), ended.err
    assert not re.findall(r"\(default: [^()]*\) \(default:", re.sub(r"[\s│]+", " ", ended.out))


NAMES = (*ALONE, "eagle:a/head", "standalone:m.pth=full@5", "suffix+markov+self=snapkv@heuristic", "self=auto@2")


@pytest.mark.parametrize("name", [*NAMES, "self@auto"])
def test_what_is_written_is_read_again(name: str) -> None:
    assert written(parse_draft(name)) == name


@pytest.mark.parametrize(
    "name", ["nothing", "self:snapkv=full", "ngram=snapkv", "nothing+self", "self@0", "suffix+ngram", "ngram:x"]
)
def test_what_is_no_draft_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--draft\n  seen:     {re.escape(name)}\n"):
        parse_draft(name)


def test_a_name_and_options_are_a_configuration() -> None:
    given = {**parse_draft("suffix+self=snapkv@5"), "snapkv_window": 16, "draft_options": ("text_match=4",)}
    draft = SelfConfig(gamma=5, policy=SnapKV(snapkv_window=16))
    assert drafts_of(given) == (Hybrid(gamma=5, draft=draft, texts=(SuffixConfig(gamma=5),), text_match=4),)
    assert drafts_of(parse_draft("eagle:a/head@2")) == (EagleConfig(gamma=2, draft_model="a/head"),)


@pytest.mark.parametrize("pair,fix", [("text_mach=4", "text_match="), ("text_match", "text_match="), ("policy=4", "")])
def test_an_option_that_no_draft_has_is_refused(pair: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){pair}.*{fix}"):
        drafts_of({"draft": "self", "draft_options": (pair,)})
