"""The benchmark scripts' flags; `engine.bench.settings` says what they mean."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from common.errors import ConfigError
from engine.bench.settings import AUTO, AUTO_BUDGETS, AUTO_GAMMA, DRAFTS, DTYPES, KV_DTYPES, POLICIES, POSITIONS
from engine.modes import MODES
from models.attention import BACKENDS
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from models.quantize import SCHEMES

# How argparse begins to say so.
UNRECOGNIZED = "unrecognized arguments:"


class Parser(argparse.ArgumentParser):
    """Turns argparse's complaints into the errors that all others are, said once however many ranks there are.

    A flag is not shortened: what is meant for another script would be taken for a longer name of this one.
    """

    def __init__(self, *, allow_abbrev: bool = False, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=allow_abbrev, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            "the command line cannot be read",
            where=self.prog,
            seen=_without_values(message),
            required="flags of this script",
            fix="see --help",
        )


def _without_values(message: str) -> str:
    """Of arguments that no flag takes, their flags alone: a value that follows a mistyped flag may be a secret."""
    if not message.startswith(UNRECOGNIZED):
        return message
    words = message.removeprefix(UNRECOGNIZED).split()
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    return " ".join([UNRECOGNIZED, *flags]) if flags else "unrecognized arguments without a flag"


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one: None means "not given"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def add_common_arguments(parser: argparse.ArgumentParser, target_flag: str = "--model") -> None:
    """The flags of every benchmark; the defaults run on the built-in model and book."""
    add_model_arguments(parser, target_flag)
    add_size_arguments(parser)
    add = parser.add_argument
    add("--num_prompts", type=int, help="prompts in all, at least B (default: B)")
    add(
        "--stop_at_eos",
        action="store_true",
        help="end a row at the model's end token (default: fixed length)",
    )
    add("--save_rows", help="append each row to this file as it finishes: its tokens survive a run that does not")


def add_model_arguments(parser: argparse.ArgumentParser, target_flag: str = "--model") -> None:
    """The target, how it is stored, what it runs on, and where the record goes."""
    add = parser.add_argument
    default = str(DEFAULT_CHECKPOINT / "model.pth")
    add(target_flag, dest="model", metavar="MODEL", default=default, help="the target's converted checkpoint")
    add("--model_name", help="name for the record; with --load_format dummy, the configuration to build")
    add("--load_format", choices=["pth", "dummy"], default="pth", help="dummy: random weights, for costs only")
    add("--verify", action="store_true", help="read all weights to check their SHA-256, remembered or not")
    add_dataset_argument(parser)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    add("--quantize", choices=SCHEMES, help="the target's linear layers in 8 or 4 bits (default: in --dtype)")
    add("--kv_dtype", choices=["same", *KV_DTYPES], default="same", help="entries of the target's KV cache")
    add("--attention", choices=BACKENDS, default="auto", help="attention backend; auto says which, and why")
    add("--compile", action="store_true", help="torch.compile what lies between matrix products and attention")
    add("--no_cuda_graphs", action="store_true", help="on a GPU, do not capture rounds as CUDA graphs")
    add("--output", help="append the JSON record to this file")


def add_dataset_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dataset",
        default=AUTO,
        help="default (the built-in book), pg19 (from the Hugging Face hub or its local cache), a .txt, .jsonl or "
        ".parquet file, or a folder of these; auto: default for the built-in model, pg19 for every other",
    )


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--B", type=int, default=8, help="rows decoded together")
    add("--prefix_len", type=int, default=6000, help="prompt tokens per row")
    add("--gen_len", type=int, default=64, help="new tokens per row")


def add_text_argument(parser: argparse.ArgumentParser) -> None:
    """For scripts that end in `report.finish`."""
    parser.add_argument("--printoutput", action="store_true", help="print every row's generated text")


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """For scripts that torchrun may start on several ranks."""
    add = parser.add_argument
    add("--rank_group", type=int, nargs="+", help="ranks that share the target, in shard order (default: all)")
    add("--check_ranks", action="store_true", help="compare a digest over ranks each round; stop if one differs")
    add("--rank_timeout", type=float, default=600, help="seconds that a rank waits for another, also to tokenise")


def add_standalone_arguments(parser: argparse.ArgumentParser) -> None:
    """A draft model of its own."""
    add = parser.add_argument
    add("--model", dest="draft_model", metavar="MODEL", required=True, help="the draft's converted checkpoint")
    add("--draft_ranks", type=int, nargs="+", help="ranks that share the draft (default: those of --rank_group)")
    _add_gamma(parser)
    _add_cache_arguments(parser, "the draft's cache")
    add(
        "--draft_positions",
        choices=POSITIONS,
        help="streaming: rotary positions of the text (absolute) or of the slots (cache), which never pass the "
        "budget; auto (the default): cache where the run is longer than the draft's trained context",
    )


def add_pass_arguments(parser: argparse.ArgumentParser) -> None:
    """Which passes a speculation benchmark makes beside the speculation itself."""
    add = parser.add_argument
    add("--no_baseline", action="store_true", help="skip plain decoding: no speedup, no comparison of rows")
    add("--benchmark", action="store_true", help="time draft and verification steps, in a pass of their own")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The law of the next token, and the rule by which drafts of it are judged."""
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top_k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all")
    add("--top_p", type=float, default=1.0, help="keep the likeliest tokens until their mass reaches this")
    add("--seed", type=int, default=0, help="key of the random numbers")
    add(
        "--verification",
        choices=MODES,
        default="auto",
        help="rejection: speculative sampling, the target's distribution; coupled: the samples of plain decoding "
        "in that mode, token for token; auto: greedy at temperature 0, else rejection",
    )


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """What drafts, and how."""
    add = parser.add_argument
    add(
        "--draft",
        choices=DRAFTS,
        default="self",
        help="self: the model over a small KV cache; ngram: copies from the row's own text; "
        "oracle: the baseline's own output, which costs nothing to draft and shows the machinery's ceiling",
    )
    _add_gamma(parser)
    _add_cache_arguments(parser, "self's cache")
    _add_layers_argument(parser)
    add("--max_ngram", type=int, help="longest match that --draft ngram looks for (default: 3)")


def add_variant_arguments(parser: argparse.ArgumentParser) -> None:
    """For scripts that go through policies, budgets and gammas of a self-draft by themselves: what these share.

    The other flags of a benchmark have one value each there; `settings.draft_settings` finds them in the namespace.
    """
    _add_window_arguments(parser)
    _add_storage_arguments(parser)
    _add_layers_argument(parser)
    one_value = {"draft": "self", "gamma": 3, "draft_policy": None, "streamingllm_budget": None, "max_ngram": None}
    one_value |= {"no_baseline": True, "benchmark": False, "num_prompts": None, "stop_at_eos": False, "save_rows": None}
    parser.set_defaults(**{name: value for name, value in one_value.items() if name not in _destinations(parser)})


def _destinations(parser: argparse.ArgumentParser) -> set[str]:
    return {action.dest for action in parser._actions}


def _add_layers_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft_layers", help="layers that self runs, such as 0-9,20-29: it skips the others (default: all)"
    )


def _add_gamma(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gamma",
        type=_count_or_auto,
        default=3,
        help=f"tokens drafted per round; auto: 0 to {AUTO_GAMMA}, what pays best by the costs measured here and the "
        "acceptance seen so far, chosen before every round",
    )


def _count_or_auto(text: str) -> int | str:
    try:
        return AUTO if text == AUTO else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number or {AUTO}, not {text!r}") from None


def _add_cache_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """None: not given. A flag that is given where it has no effect is refused, see DRAFT_FLAGS."""
    add = parser.add_argument
    add(
        "--draft_policy",
        choices=POLICIES,
        help=f"what {what} keeps: sinks and recent tokens (streaming, the default), what the prompt's last queries "
        "attend to and recent tokens (snapkv), or all",
    )
    budgets = ", ".join(map(str, AUTO_BUDGETS))
    add(
        "--draft_budget",
        "--streamingllm_budget",
        dest="streamingllm_budget",
        metavar="DRAFT_BUDGET",
        type=_count_or_auto,
        help="KV entries per row, sinks or selected ones and recent ones together (default: 512); -1 is "
        f"--draft_policy full; auto, of a self-draft: what of {budgets} pays best, seen while decoding, of those that "
        "are shorter than the prompt and leave as much room beside sinks or window; rounds may then be plain, too",
    )
    _add_window_arguments(parser)
    _add_storage_arguments(parser)


def _add_window_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--n_sink", type=int, help="streaming: attention sinks in the budget (default: 4)")
    add("--snapkv_window", type=int, help="snapkv: recent tokens in it, whose queries also select (default: 32)")


def _add_storage_arguments(parser: argparse.ArgumentParser) -> None:
    """How what drafts is stored."""
    add = parser.add_argument
    add(
        "--draft_dtype",
        choices=["auto", "same", *DTYPES],
        help="dtype of the draft's weights and cache; same: the target's (a self-draft then shares its weights); "
        "auto (the default): bfloat16 beside a float32 target on a CPU that computes in bfloat16, else same",
    )
    add(
        "--draft_weights",
        choices=["same", *SCHEMES],
        help="the draft's linear layers in 8 or 4 bits; the target keeps its own, so the output stays what it is "
        "(default: same)",
    )
    add("--draft_kv_dtype", choices=["same", *KV_DTYPES], help="entries of the draft's KV cache (default: same)")
