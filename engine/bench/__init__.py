"""A run: its configuration and plan, the session that it becomes, its passes, and their record."""

from common.lazy import lazily

_HOMES = {
    "engine.bench.auto_costs": ("RunCosts", "costs_of"),
    "engine.bench.data": ("load_books", "make_prompts"),
    "engine.bench.passes": ("Decoded", "Passes", "decode", "make_pacing", "prefill", "warm_up"),
    "engine.bench.plan": ("resolve", "resolve_several"),
    "engine.bench.record": (
        "COUNTED",
        "costs_record",
        "distinct_4gram_fraction",
        "cache_of",
        "identical_rows",
        "make_record",
        "ratio",
        "record_of",
        "rounded",
        "tokens_per_second",
    ),
    "engine.bench.resolved": ("option_names",),
    "engine.bench.settings": ("settings_record",),
    "engine.bench.text": ("resolve_dataset",),
}
__getattr__ = lazily(__name__, {name: module for module, names in _HOMES.items() for name in names})
