"""Episodes as text and as a page: who said what for which reward, and nothing that was said is run."""

import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from plan_cases import config

from siirl.compiler.compile import compile_plan
from siirl.config import load_config
from siirl.dag.ops import score_names
from siirl.dag.spec import DagBuilder
from siirl.dag_worker.step_report import Report
from siirl.data.rows import make_rows
from siirl.dialect.dialect import Dialect
from siirl.nodes.context import Samples
from siirl.nodes.function_reward import show
from siirl.observe.console import ConsoleSink
from siirl.observe.sinks import SampleSink
from siirl.show.conversation_page import page, write_page
from siirl.show.conversation_text import MAX_MESSAGE, ShownEpisode, episode_text, split_episodes
from siirl.view.view_page import first_data
from siirl.view.view_page import page as view_page

EVIL = "</pre></script><script>alert(1)</script><img src=x onerror='alert(2)'>\" & \x00\x1b[31m\u202e\ud800"


def message(content, agent=None, node=None, turn=None, reward=0.0, **info):
    role = "assistant" if agent is not None else info.pop("role", "user")
    return {
        "role": role,
        "content": content,
        "agent": agent,
        "node": node,
        "turn": turn,
        "reward": reward,
        **info,
    }


def episode(title="task 3, sample 1", content="\nfour", reward=1.0, note="ground truth: 4"):
    messages = [
        message("2 + 2 ?"),
        message("add them", 0, "planner", 0, -0.25, weight_version=7, finish_reason="length"),
        message("4", role="tool", tool="calculator", node="worker", to=1),
        message(
            content, 1, "worker", 1, reward, weight_version=7, finish_reason="stop", tool_errors=["unknown"]
        )
        | {"weight_versions": [7, 8, 10]},
    ]
    return ShownEpisode(title, messages, {0: -0.25, 1: reward}, note)


class Reader(HTMLParser):
    """Tags with their attributes, the texts of elements by class, and whether all that opens is closed."""

    EMPTY = ("meta", "input")

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts, self.data = [], [], {}, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.EMPTY:
            self.open.append((tag, dict(attributes).get("class")))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1][1] or self.open[-1][0], []).append(data)


def test_text_names_speakers_rewards_and_what_went_wrong():
    assert episode_text(episode()).split("\n") == [
        "task 3, sample 1  [agent 0 -0.25, agent 1 +1]",
        "  user",
        "    | 2 + 2 ?",
        "  0. planner (agent 0)  env -0.25  (ended by length)",
        "    | add them",
        "  tool calculator",
        "    | 4",
        "  1. worker (agent 1)  env +1  (tool errors: unknown)",
        "    | ",
        "    | four",
        "  ground truth: 4",
    ]


def test_the_page_holds_each_turn_with_its_agent_and_reward():
    reader = Reader(page([episode(), episode("task 4", reward=0.5)], "run, step 2"))
    assert not reader.open
    turns = [attributes for tag, attributes in reader.tags if "message" in attributes.get("class", "")]
    assert [turn.get("data-agent") for turn in turns] == [None, "0", None, "1"] * 2
    colors = {turn.get("style") for turn in turns if turn.get("data-agent")}
    assert len(colors) == 2
    episodes = [attributes for tag, attributes in reader.tags if tag == "details"]
    assert [(e["data-reward"], e["data-reward-0"], e["data-reward-1"]) for e in episodes] == [
        ("0.375", "-0.25", "1"),
        ("0.125", "-0.25", "0.5"),
    ]
    assert reader.texts["text"][3] == "\n\nfour"  # HTML drops the first of two line breaks
    assert reader.texts["reward down"][:2] == ["-0.25", "env -0.25"]
    assert reader.texts["reward up"][:2] == ["+1", "env +1"]
    assert reader.texts["name"][:4] == ["user", "planner (agent 0)", "tool calculator", "worker (agent 1)"]
    assert reader.texts["down"] == ["tool errors: unknown"] * 2
    assert [attributes["value"] for tag, attributes in reader.tags if tag == "option"][:3] == ["", "0", "1"]


def test_the_page_has_the_design_of_siirl_view_and_no_other():
    """One style sheet: every class and colour of a conversation's page is of `siirl view`, too."""
    text = page([episode()], "run, step 2")
    (style,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    viewed = "".join(view_page(first_data([], live=False) | {"runs": [{"label": "run", "overview": None}]}))
    assert f"<style>{style}</style>" in viewed
    styles = {attributes["style"] for _, attributes in Reader(text).tags if "style" in attributes}
    assert styles and all(one.startswith("--agent: #") for one in styles)


def test_what_was_said_in_parts_has_its_reasoning_folded():
    said = {"reasoning": "2+2", "answer": "\n4", "calls": [{"name": "add", "arguments": {"x": 2}}]}
    turn = message("<think>2+2</think>4", 0, "solver", 0) | {"said": said}
    reader = Reader(page([ShownEpisode("t", [turn], {0: 1.0})], "t"))
    assert reader.texts["text"] == ["\n2+2", "\n\n4"] and reader.texts["call"] == ["\nadd(x=2)"]
    assert ("details", {"class": "reasoning"}) in reader.tags
    damaged = turn | {"said": {"reasoning": [EVIL], "calls": [7, {"malformed": EVIL}]}}
    assert "<img" not in page([ShownEpisode("t", [damaged], {0: 1.0})], "t")


def test_nothing_that_was_said_becomes_markup_and_nothing_is_loaded():
    evil = ShownEpisode(
        EVIL, [message(EVIL, 0, EVIL, 0, tool_errors=[EVIL], finish_reason=EVIL)], {0: 1}, EVIL
    )
    text = page([evil], EVIL)
    reader = Reader(text)
    assert not reader.open
    plain = Reader(page([episode()], "t"))
    assert {tag for tag, _ in reader.tags} <= {tag for tag, _ in plain.tags}
    assert sum(tag == "script" for tag, _ in reader.tags) == 1
    names = {name for _, attributes in reader.tags for name in attributes}
    assert not names & {"onerror", "src", "href"} and not re.search(r"url\(|https?:|@import", text)
    assert "alert(1)" in reader.texts["text"][0] and "\\x00" in text and "\\u202e" in text
    assert "\x00" not in text and "\x1b" not in text


def test_a_page_is_written_whole_and_long_messages_are_cut(tmp_path):
    path = tmp_path / "conversations" / "step_3.html"
    write_page(path, [episode(content="x" * (3 * MAX_MESSAGE))], "t")
    text = path.read_text(encoding="utf-8")
    assert len(text) < 2 * MAX_MESSAGE and "characters skipped" in text
    assert [file.name for file in path.parent.iterdir()] == ["step_3.html"]
    assert "No episodes." in page([], "t")


def sampled(agent, score, turn, sample_index=4, **info):
    shown = {"agent": agent, "episode_id": 8, "conversation": episode(reward=0.0).messages, "turn": turn}
    shown["conversation"][1]["reward"] = 0.0
    return {
        "node": "reward",
        "data_source": "sums",
        "sample_index": sample_index,
        "score": score,
        **info,
        "prompt": "p",
        "response": "r",
        "ground_truth": "4",
        "episode": shown,
    }


def test_sampled_rows_of_an_episode_become_one_conversation_with_scores_where_rows_end():
    plain = {"score": 2.0, "prompt": "of no interaction"}
    rows = [sampled(1, 0.5, 1, right=0.25), plain, sampled(0, -1.0, 0), sampled(1, 1.5, 1, sample_index=5)]
    shown, episodes = split_episodes(rows)
    assert [one.rewards for one in episodes] == [{0: -1.0, 1: 0.5}, {1: 1.5}]  # of the same id, two prompts
    assert shown[0] == plain and len(shown) == 3
    assert shown[1]["rewards"] == {"agent 0": -1.0, "agent 1": 0.5}
    assert [message.get("score") for message in shown[1]["messages"]] == [None, -1.0, None, 0.5]
    assert shown[1]["conversation"].split("\n") == [
        "sums, row 4, episode 8  [agent 0 -1, agent 1 +0.5]",
        "  user",
        "    | 2 + 2 ?",
        "  0. planner (agent 0)  score -1  (ended by length)",
        "    | add them",
        "  tool calculator",
        "    | 4",
        "  1. worker (agent 1)  score +0.5  (tool errors: unknown)",
        "    | ",
        "    | four",
        "  ground truth: 4; agent 1: right 0.25",
    ]


def test_why_an_episode_ended_is_in_the_text_the_page_and_the_lines():
    rows = [sampled(1, 0.5, 1), sampled(0, -1.0, 0)]
    for row in rows:
        row["episode"]["ended"] = "what worker reads (31 tokens) does not fit"
    (shown,), (one,) = split_episodes(rows)
    line = "ended: what worker reads (31 tokens) does not fit"
    assert shown["conversation"].split("\n")[-2:] == [f"  {line}", "  ground truth: 4"]
    assert shown["episode"] == {"episode_id": 8, "ended": line.removeprefix("ended: ")}
    assert Reader(page([one], "run")).texts["details faint"] == [line, "ground truth: 4"]


def test_a_reward_of_the_environment_stands_at_the_turns_that_it_named_and_at_no_other():
    messages = [
        message("a", 0, "x", 0),
        message("b", 1, "y", 1, 0.0, rewarded=True),
        message("c", 0, "x", 2, 1.0),
    ]
    text = episode_text(ShownEpisode("e", messages))
    heads = [line.strip() for line in text.split("\n") if "agent" in line]
    assert heads == ["0. x (agent 0)", "1. y (agent 1)  env 0", "2. x (agent 0)  env +1"]


def test_the_score_of_each_row_stands_at_the_turn_that_ends_it():
    rows = [sampled(0, score, turn) for turn, score in ((0, 1.0), (2, 3.0))]
    for row in rows:
        row["episode"]["conversation"].append(message("again", 0, "planner", 2))
    _, (episode_of,) = split_episodes(rows)
    assert [one.get("score") for one in episode_of.messages if one["agent"] == 0] == [1.0, 3.0]
    assert episode_of.rewards == {0: 2.0}


def test_the_text_file_has_each_conversation_once_and_the_lines_its_messages(tmp_path):
    shown, _ = split_episodes([sampled(1, 0.5, 1), sampled(0, -1.0, 0)])
    sink = SampleSink(tmp_path, {})
    sink.text(3, "validation", shown)
    text = (tmp_path / "rollouts" / "validation" / "step_3.txt").read_text()
    assert text.count("worker (agent 1)  score +0.5") == 1 and "[{" not in text
    (line,) = (tmp_path / "rollouts" / "validation" / "step_3.jsonl").read_text().splitlines()
    assert [message["agent"] for message in json.loads(line)["messages"]] == [None, 0, None, 1]


def test_the_console_prints_one_conversation_of_a_validation(capsys):
    shown, _ = split_episodes([sampled(1, 0.5, 1), sampled(1, 1.5, 1, sample_index=5)])
    console = ConsoleSink(total_steps=4)
    console.text(2, "train", shown)
    console.text(2, "validation", [{"score": 1.0, "prompt": "of no interaction"}])
    assert capsys.readouterr().out == ""
    console.text(2, "validation", shown)
    out = capsys.readouterr().out
    assert "validation at step 2" in out and out.count("planner (agent 0)") == 1 and "row 5" not in out


class OneRank(Report):
    def _join(self, mine, add):
        return mine


@pytest.mark.parametrize("named", [True, False])
def test_each_validation_of_an_interaction_has_a_page_named_as_the_run_or_else_its_dag(tmp_path, named):
    written = []
    trainer = SimpleNamespace(output_dir=str(tmp_path), experiment_name="run", samples_gib=1)
    sinks = SimpleNamespace(text=lambda *arguments: written.append(arguments[:2]))
    cfg = SimpleNamespace(trainer=trainer, explicit=("trainer.experiment_name",) if named else ())
    report = OneRank(
        SimpleNamespace(cfg=cfg, plan=SimpleNamespace(dag_id="sums"), rank=0, sample_limit=4), sinks
    )
    rows = [sampled(1, 0.5, 1), sampled(0, -1.0, 0)]
    for step, kind, given in (
        (2, "train", rows),
        (2, "validation", rows),
        (4, "validation", [{"score": 1.0, "prompt": "of no interaction"}]),
        (6, "validation", []),
    ):
        report.samples(step, kind, given)
    assert written == [(2, "train"), (2, "validation"), (4, "validation")]
    (path,) = (tmp_path / "conversations").iterdir()
    assert path.name == "step_2.html"
    text = path.read_text()
    assert f"<h1>{'run' if named else 'sums'}: validation, step 2</h1>" in text
    reader = Reader(text)
    assert "score -1" in reader.texts["reward down"] and "score +0.5" in reader.texts["reward up"]


def shown_rows(limit, tokenizer, agent=1, extra_info=None):
    """What a reward node shows of 3 prompts x 2 responses."""
    ctx = SimpleNamespace(
        node_id="reward",
        agent=agent,
        shown=Samples([], limit, []),
        tokenizer=tokenizer,
        trained=None,
        validate=True,
        dialect=Dialect("small"),
        cfg=config(),
    )
    columns = {
        "sample_index": [7, 7, 8, 8, 9, 9],
        "data_source": ["sums"] * 6,
        "raw_prompt": [[{"role": "user", "content": f"prompt {index // 2}"}] for index in range(6)],
        "response_ids": [[index] for index in range(6)],
        "response_length": [1] * 6,
        "ground_truth": ["four"] * 6,
    }
    columns |= {"extra_info": extra_info} if extra_info else {}
    scored = {"score": [float(index) for index in range(6)], "reward_info": [{"digits": 2}] * 6}
    show(ctx, make_rows(columns), make_rows(scored))
    return ctx.shown.rows


class Numbers:
    """A tokenizer that writes the ids."""

    def decode(self, ids, skip_special_tokens):
        return f"answer {ids.tolist()[0]}"


@pytest.mark.parametrize(
    ("limit", "scores"),
    [(0, []), (1, [0]), (3, [0, 2, 4]), (4, [0, 1, 2, 4]), (99, range(6)), (-1, range(6))],
)
def test_samples_are_of_as_many_prompts_as_there_are(limit, scores):
    assert [row["score"] for row in shown_rows(limit, Numbers())] == list(scores)


def test_episodes_are_shown_whole_and_of_different_prompts():
    extra = [{"conversation": [], "episode_id": 10 + index // 2, "agent": index % 2} for index in range(4)]
    extra += [{"conversation": [], "episode_id": 20 + index, "agent": 0} for index in range(2)]
    columns = {"sample_index": [7, 7, 7, 7, 9, 9]}
    rows = make_rows(
        columns
        | {
            "data_source": ["sums"] * 6,
            "raw_prompt": ["p"] * 6,
            "response_ids": [[index] for index in range(6)],
            "response_length": [1] * 6,
            "ground_truth": ["four"] * 6,
            "extra_info": extra,
        }
    )
    ctx = SimpleNamespace(
        node_id="reward",
        agent=0,
        shown=Samples([], 2, []),
        tokenizer=Numbers(),
        trained=None,
        validate=True,
        dialect=Dialect("small"),
        cfg=config(),
    )
    show(ctx, rows, make_rows({"score": [float(index) for index in range(6)], "reward_info": [{}] * 6}))
    assert [row["score"] for row in ctx.shown.rows] == [0, 1, 4], (
        "both rows of the first episode of each prompt"
    )


def test_responses_of_one_turn_have_a_page_and_files_without_what_is_only_for_it():
    shown, episodes = split_episodes(shown_rows(2, Numbers()))
    assert [row["prompt"] for row in shown] == ["user: prompt 0", "user: prompt 1"]
    assert "chat" not in shown[0] and shown[0]["digits"] == 2
    first, second = episodes
    assert (first.title, second.title) == ("sums, row 7, sample 0", "sums, row 8, sample 1")
    assert first.rewards == {1: 0.0} and second.rewards == {1: 2.0} and second.turns == 1
    text = episode_text(second)
    for words in (
        "user\n    | prompt 1",
        "0. agent 1  score +2",
        "| answer 2",
        "ground truth: four; agent 1: dig",
    ):
        assert words in text
    assert "answer 2" in page(episodes, "one turn")


@pytest.mark.parametrize("kind", ["combination", "judge"])
def test_a_score_of_several_rewards_or_of_a_judge_is_shown_as_a_conversation(kind):
    """It reads what tells the rows of an interaction apart; a part of it does not."""
    dag = DagBuilder("talk")
    dag.node("solver", "MODEL_INFERENCE", "ROLLOUT")
    dag.node("verifier", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=["solver"])
    if kind == "judge":
        dag.node("last", "MODEL_INFERENCE", "REWARD", dependencies=["verifier"])
    else:
        dag.node("part", "COMPUTE", "REWARD", dependencies=["verifier"], writes=["helpful"])
        dag.node("last", "COMPUTE", "REWARD", dependencies=["part"], reads=["helpful"])
    dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=["last"])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=["advantage"])
    keys = ("enable=True", "model.path=judge", "judge.name=hf", "judge.prompt='Rate {response}'")
    judge = [f"reward_model.{key}" for key in keys] if kind == "judge" else []
    sizes = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    cfg = load_config([*judge, *sizes, "algorithm.adv_estimator=grpo", "trainer.device=cpu"])
    plan, _ = compile_plan(dag.build(), cfg, 1)
    assert {"extra_info", "turn_id"} <= {key.name for key in plan.run_of("last").reads}
    if kind == "combination":
        assert score_names(key.name for key in plan.run_of("last").reads) == ("helpful",)
