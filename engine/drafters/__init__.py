"""Drafters: what proposes the tokens that the target verifies. One protocol, one file each."""

from engine.drafters.base import Drafter, Shown, check_gamma
from engine.drafters.config import DrafterConfig, ModelDrafterConfig, drafters
from engine.drafters.eagle import Eagle, EagleConfig
from engine.drafters.medusa import Medusa, MedusaConfig
from engine.drafters.ngram import NGram, NGramConfig
from engine.drafters.saved_text import OracleConfig, SavedText
from engine.drafters.self_speculation import SelfConfig, SelfSpeculation
from engine.drafters.standalone import StandaloneConfig, StandaloneDraft
