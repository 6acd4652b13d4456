"""`text/<task>`: problems in words that are answered in tokens and scored by a verifier.

An episode is one problem: its instruction states it, an action is one token, and the end-of-sequence token or the
token limit ends it. There is no picture and no robot. Tasks: `countdown_3`, `countdown_4`, `countdown_3_two_tries` (a
wrong answer is replied to and tried again), and, where the package is installed, reasoning-gym's generators as
`reasoning_gym/<name>`. Problems from files are a backend of one's own (`problem_files`).
"""

from embodied_language.text import reasoning_gym
from embodied_language.text.countdown import COUNTDOWN
from embodied_language.text.physics import text_backend

BACKEND = text_backend("text", lambda: {**COUNTDOWN, **reasoning_gym.tasks()})
