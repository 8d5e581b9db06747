"""An OpenEnv server: guess a number, with hints. python guess_server.py PORT; pip install openenv-core"""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """What the agent said."""

    message: str


class Hint(Observation):
    """higher, lower or right."""

    text: str


class Number(Environment):
    """Who guesses it in the first turn earns 1, in the second 0.75, and so on, to the fourth."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        """Draw the number."""
        self.number, self.worth = random.Random(seed).randrange(7), 1.0
        return Hint(text="guess")

    def step(self, action, timeout_s=None, **options):
        """One guess."""
        said = action.message.strip()
        worth, self.worth = self.worth, self.worth - 0.25
        if not said.isdigit():
            return Hint(text="guess", reward=0.0, done=self.worth <= 0)
        right = int(said) == self.number
        hint = "right" if right else "higher" if int(said) < self.number else "lower"
        return Hint(text=hint, reward=worth * right, done=right or self.worth <= 0)

    @property
    def state(self):
        """Nothing that others may see."""
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Number, Guess, Hint, max_concurrent_envs=1000)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
