"""Dead letters: find them, group them by their errors, replay them, delete them."""

from aztask.operate.deadletters.letters import DeadLetterView, LetterGroup, Selection
from aztask.operate.deadletters.view import DeadLetters, Report

__all__ = ["DeadLetterView", "DeadLetters", "LetterGroup", "Report", "Selection"]
