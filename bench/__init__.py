"""A benchmark run: its configuration and plan, the session that it becomes, its passes, and their record."""

from bench.auto.measure import RunCosts, costs_of
from bench.config import RunConfig
from bench.data import load_books, make_prompts, resolve_dataset
from bench.passes import Decoded, PassResults, decode, make_controller, prefill, warm_up
from bench.plan import resolve, resolve_several
from bench.record import (
    COUNTED,
    cache_of,
    costs_record,
    distinct_4gram_fraction,
    identical_rows,
    make_record,
    ratio,
    record_of,
    rounded,
    tokens_per_second,
    tokens_sha256,
)
from bench.session import Session
from bench.settings import nested, option_names, options_of, reads_text, settings_record
