"""A benchmark run: its configuration and plan, the session that it becomes, its passes, and their record."""

from bench.auto.measure import RunCosts, costs_of
from bench.config import RunConfig
from bench.data import load_books, resolve_dataset
from bench.draft_flags import option_names
from bench.passes import Decoded, PassResults, decode, joined, make_controller, prefill, warm_up
from bench.plan import resolve, resolve_each
from bench.record import (
    acceptance,
    distinct_4gram_fraction,
    make_record,
    nested,
    options_of,
    ratio,
    record_of,
    rounded,
    settings_record,
    tokens_sha256,
)
from bench.session import Session
from bench.table import few_rounds, legend, looping, reads_text, speedup_text
