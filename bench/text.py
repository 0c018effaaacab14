"""Which text a run continues: a data set's, or one's own prompts."""

from collections.abc import Sequence

from bench.config import AUTO, RunConfig
from bench.data import BUILT_IN, PG19
from bench.prompt_sets import load_prompts
from common.errors import ConfigError, flag, without_effect
from models.checkpoints.model_source import ModelSource

# A prompt: a text, or its token ids.
PromptText = str | Sequence[int]


def resolve_dataset(config: RunConfig, target: ModelSource) -> str | None:
    """`auto` is the built-in book for the built-in model, and PG-19 for every other; None for random weights. Errors:
    ConfigError for what has no effect on these."""
    wanted = config.text.dataset
    if target.has_text:
        return wanted if wanted != AUTO else BUILT_IN if target.is_default else PG19
    what, seen = "random weights read neither a checkpoint nor a text", f"given, with {flag('load_format')} dummy"
    given = {"dataset": wanted != AUTO, "prompts": config.rows.prompts is not None}
    given |= {"stop_at_eos": config.rows.stop_at_eos, "verify": config.target.verify}
    if useless := [name for name, is_given in given.items() if is_given]:
        raise without_effect(useless, what, seen=seen, required="a trained model")
    return None


def own_prompts(config: RunConfig, target: ModelSource, texts: Sequence[PromptText] | None) -> list[list[int]] | None:
    """One's own prompts as token ids: `texts`, or what `--prompts` names; of a conversation, its first turn."""
    named = config.rows.prompts
    if texts is None and named is None:
        return None
    given = {"prompts": texts is not None and named is not None, "dataset": config.text.dataset != AUTO}
    given |= {"prefix_len": config.sizes.prefix_len is not None, "num_prompts": config.rows.num_prompts is not None}
    what, seen = "one's own prompts are taken whole, and all of them", f"given, with {flag('prompts')}"
    if useless := [name for name, is_given in given.items() if is_given]:
        raise without_effect(useless, what, seen=seen, required="either")
    if texts is not None and (isinstance(texts, str) or not texts or not all(texts) or not target.has_text):
        what, required = "these prompts cannot be continued", "texts, none of them empty, and a trained model"
        raise ConfigError(what, "Session.open: prompts", repr(texts)[:80], required, "give [text, text, ...]")
    tokenizer = target.tokenizer()
    texts = [one.turns[0] for one in load_prompts(str(named))] if texts is None else texts
    prompts = [tokenizer.encode(one, add_bos=True) if isinstance(one, str) else list(one) for one in texts]
    target.check_tokens(prompts)
    return prompts
