"""Reinforcement learning with rollouts that always use the newest committed weights.

Rollout tasks play episodes of a toy game with the version that a `Reloader` serves. A learner
improves the policy with what they bring and commits it; the rollouts go on meanwhile, each
episode by one version from its first move to its last. The exit status is 1 if nothing was learned.

In a real system the rollouts are processes of their own, on other machines: the code stays the
same, since all they share is the run. The folder may be a disk that both can see.

    python examples/rl_weights.py
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import aiockpt
from aiockpt.policies.keep import KeepLast

CELLS, LONGEST = 9, 24
"""A corridor: who reaches its right end quickly gets the most."""
BATCH, ROLLOUTS = 24, 4
STALE = 5
"""An episode played with weights that are older than this many updates teaches nothing any more."""


def build() -> torch.nn.Module:
    """The policy: from a cell to the odds of going left and right."""
    return torch.nn.Sequential(torch.nn.Linear(CELLS, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


@dataclass(frozen=True)
class Episode:
    """What one game brought."""

    step: int
    """The version that played it."""
    cells: list[int]
    moves: list[int]
    score: float


def choose(policy: torch.nn.Module, cell: int) -> int:
    """A move of the policy."""
    seen = torch.nn.functional.one_hot(torch.tensor(cell), CELLS).float()
    with torch.inference_mode():
        return int(torch.distributions.Categorical(logits=policy(seen)).sample())


async def play(live: aiockpt.Live[torch.nn.Module]) -> Episode:
    """One game, by one version."""
    cell = int(torch.randint(CELLS - 1, ()))
    cells: list[int] = []
    moves: list[int] = []
    while cell < CELLS - 1 and len(moves) < LONGEST:
        move = choose(live.model, cell)
        cells.append(cell)
        moves.append(move)
        cell = max(0, cell + (1 if move else -1))
        await asyncio.sleep(0)  # a real one awaits a tool, a browser, an inference engine
    return Episode(live.step, cells, moves, float(cell == CELLS - 1) - len(moves) / LONGEST)


async def roll_out(reloader: aiockpt.Reloader[torch.nn.Module], episodes: asyncio.Queue[Episode]) -> None:
    """Play for ever, each game with the newest weights there are when it begins."""
    while True:
        async with reloader.use() as live:
            episode = await play(live)
        await episodes.put(episode)


def improve(policy: torch.nn.Module, optim: torch.optim.Optimizer, batch: list[Episode]) -> float:
    """One step of policy gradient; returns the mean score."""
    scores = torch.tensor([episode.score for episode in batch])
    advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
    lengths = torch.tensor([len(episode.moves) for episode in batch])
    cells = torch.tensor([cell for episode in batch for cell in episode.cells])
    moves = torch.tensor([move for episode in batch for move in episode.moves])
    odds = torch.distributions.Categorical(logits=policy(torch.nn.functional.one_hot(cells, CELLS).float()))
    loss = -(odds.log_prob(moves) * advantages.repeat_interleave(lengths)).mean()
    optim.zero_grad()
    loss.backward()
    optim.step()
    return float(scores.mean())


async def collect(episodes: asyncio.Queue[Episode], step: int) -> tuple[list[Episode], int]:
    """A batch of episodes that are fresh enough, and how many were not."""
    batch: list[Episode] = []
    stale = 0
    while len(batch) < BATCH:
        episode = await episodes.get()
        if step - episode.step > STALE:
            stale += 1
        else:
            batch.append(episode)
    return batch, stale


async def learn(saver: aiockpt.Saver, episodes: asyncio.Queue[Episode], updates: int) -> list[float]:
    """Improve the policy so many times; returns the mean score of each batch."""
    policy = build()
    optim = torch.optim.Adam(policy.parameters(), lr=0.03)
    history: list[float] = []
    await saver.save({"model": policy, "optim": optim}, step=0)
    for step in range(1, updates + 1):
        batch, stale = await collect(episodes, step - 1)
        history.append(improve(policy, optim, batch))
        # Returns once it is committed, which the rollouts hear of; they have gone on playing meanwhile.
        await saver.save({"model": policy, "optim": optim}, step=step, metrics={"score": history[-1]})
        lag = sum(step - 1 - episode.step for episode in batch) / len(batch)
        if step % 5 == 0 or step == 1:
            print(
                f"update {step:>3}: mean score {history[-1]:+.2f}, by weights {lag:.1f} updates old, "
                f"{len({episode.step for episode in batch})} versions in the batch, {stale} episodes too old",
                flush=True,
            )
    return history


async def main(run: Path, updates: int) -> int:
    """Learner and rollouts; returns the exit status."""
    torch.manual_seed(0)
    episodes: asyncio.Queue[Episode] = asyncio.Queue(maxsize=BATCH)
    async with (
        aiockpt.Saver(run, keep=KeepLast(3)) as saver,
        aiockpt.Reloader(run, build, poll=0.02, drain_timeout=1.0) as reloader,
    ):
        rollouts = [asyncio.create_task(roll_out(reloader, episodes)) for _ in range(ROLLOUTS)]
        history = await learn(saver, episodes, updates)
        for task in rollouts:
            task.cancel()
        await asyncio.wait(rollouts)
        await saver.drain()
        await reloader.wait_for(updates)  # the last weights serve, too
        reloads = reloader.status()["reloads"]
    first, last = sum(history[:5]) / 5, sum(history[-5:]) / 5
    print(f"{reloads} versions were used; mean score {first:+.2f} at first, {last:+.2f} in the end")
    return 0 if last > first + 0.2 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--run", type=Path, help="the run's folder; by default one that is removed again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aiockpt-rl-") as folder:
        sys.exit(asyncio.run(main(args.run or Path(folder, "policy"), max(10, args.updates))))
