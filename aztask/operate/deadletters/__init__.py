"""Dead letters: find them, group them by their errors, replay them, delete them."""

from aztask.operate.deadletters.letters import HOLD_VALUES, DeadLetterView, LetterGroup, Selection
from aztask.operate.deadletters.view import DeadLetters, Report

__all__ = ["HOLD_VALUES", "DeadLetterView", "DeadLetters", "LetterGroup", "Report", "Selection"]
