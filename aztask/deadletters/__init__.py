"""Dead letters: find them, group them by their errors, replay them, delete them."""

from aztask.deadletters.letters import Selection
from aztask.deadletters.view import DeadLetters, Report

__all__ = ["DeadLetters", "Report", "Selection"]
