"""Drafters: what proposes the tokens that the target verifies. One protocol, one file each."""

from engine.drafters.base import Drafter, RowUpdate, check_gamma
from engine.drafters.combined import Combined
from engine.drafters.config import DrafterConfig, HostDrafterConfig, ModelDrafterConfig, drafters
from engine.drafters.eagle import Eagle, EagleConfig
from engine.drafters.markov import Markov, MarkovConfig
from engine.drafters.medusa import Medusa, MedusaConfig
from engine.drafters.ngram import NGram, NGramConfig
from engine.drafters.ngram_cache import NGramCache, NGramCacheConfig
from engine.drafters.saved_text import OracleConfig, SavedText
from engine.drafters.self_speculation import SelfConfig, SelfSpeculation
from engine.drafters.standalone import StandaloneConfig, StandaloneDraft
from engine.drafters.suffix import Suffix, SuffixConfig
from engine.drafters.text_drafter import Guess, HostDrafter, TextDrafter
