"""Data sources as people's files have them, and the built-in rewards of each kind of question."""

import decimal
import json

import numpy as np
import pytest

from siirl.errors import ConfigError, DataError
from siirl.rewards.by_data_source import built_in
from siirl.rewards.countdown import countdown
from siirl.rewards.ifeval_instructions import CHECKS, LANGUAGE, ifeval, read_instructions
from siirl.rewards.math_answer import math_dapo
from siirl.rewards.questions import multiple_choice, read_choice, search_qa
from siirl.rewards.reward_registry import REWARDS, accepted_answers

SOURCES = {
    "math": "MATH math500 MATH-500 HuggingFaceH4/MATH-500 lighteval/MATH DigitalLearningGmbH/MATH-lighteval "
    "olympiadbench minerva_math OpenR1-Math open-r1/OpenR1-Math-220k polaris POLARIS-Project/Polaris-Dataset "
    "orz_math hiyouga/geometry3k amc23 numina_olympiads deepscaler hendrycks_math "
    "agentica-org/DeepScaleR-Preview-Dataset HMMT25 AI-MO/NuminaMath-CoT "
    "AI-MO/aimo-validation-aime aimo_validation_amc math_level3to5 MATH-lvl3-5 lighteval/MATH-Hard "
    "simplerl_math zwhe99/DeepMath-103K gaokao2023en college_math ByteDance-Seed/BeyondAIME gsm_hard mgsm "
    "meta-math/MetaMathQA train-math-numinamath1.5_aops_forum hiyouga/math12k",
    "math_dapo": "AIME2024 aime24 aime_2025 MathArena/aime_2025 BytedTsinghua-SIA/DAPO-Math-17k "
    "HuggingFaceH4/aime_2024 AIME Maxwell-Jia/AIME_2024 unsloth/aime DAPO-17k "
    "BytedTsinghua-SIA/AIME-2024 math_dapo",
    "gsm8k": "openai/gsm8k GSM8K gsm8k_train gsm-8k madrylab/gsm8k-platinum gsm8k_w_tool",
    "multiple_choice": "gpqa gpqa_diamond Idavidrein/gpqa mmlu_pro TIGER-Lab/MMLU-Pro ARC-Challenge "
    "ARC-C arc_easy csqa",
    "countdown": "countdown Jiayi-Pan/Countdown-Tasks-3to4",
    "ifeval": "ifeval google/IFEval",
    "search_qa": "nq searchR1_nq searchR1_hotpotqa searchR1_2wikimultihopqa triviaqa musique bamboogle popqa",
    "code": "codecontests apps codeforces taco livecodebench_v5 lcbv5 primeintellect",
    "exact_match": "arithmetic arithmetic/sums exact_match",
    "reasoning_gym": "reasoning_gym/chain_sum",
}


@pytest.mark.parametrize("function", SOURCES)
def test_data_sources_have_their_reward_by_the_names_that_files_have(function):
    for source in SOURCES[function].split():
        assert built_in(source) == function, source


def test_a_source_that_nothing_is_known_of_has_none():
    assert [
        built_in(source) for source in ("unheard/of", "mathematics_of_cats", "nqx", "my/data", "", "arc_agi")
    ] == [None] * 6


TRUTHS = [
    (7.0, ["7", "7.0"]),
    (np.float64(7.0), ["7", "7.0"]),
    (1e16, ["10000000000000000", "1e+16"]),
    (-0.0, ["0", "-0.0"]),
    (0.25, ["0.25"]),
    (1e-7, ["0.0000001", "1e-07"]),
    (np.int64(7), ["7"]),
    (np.array([7.0, 8.0]), ["7", "7.0", "8", "8.0"]),
    (np.array("B"), ["B"]),
    (decimal.Decimal("7.00"), ["7", "7.00"]),
    (decimal.Decimal("2.50"), ["2.5", "2.50"]),
    (True, ["True", "true"]),
    (np.bool_(False), ["False", "false"]),
    ([1.0, None, float("nan"), "x "], ["1", "1.0", "x"]),
    (" 7 ", ["7"]),
    (10**40, [str(10**40)]),
]


@pytest.mark.parametrize(("truth", "texts"), TRUTHS, ids=repr)
def test_a_right_answer_is_read_in_whichever_type_it_has(truth, texts):
    assert accepted_answers(truth) == texts
    for text in texts:
        assert REWARDS["exact_match"].fn("s", f" {text}\n", truth, None) == 1


@pytest.mark.parametrize(
    "truth", [None, "", [" "], [], float("nan"), [None], np.array([np.nan]), {"a": 1}], ids=repr
)
def test_a_right_answer_that_says_nothing_is_an_error(truth):
    with pytest.raises(DataError, match=r"reward_model\.ground_truth"):
        accepted_answers(truth)


CHOICES = [
    (r"so \boxed{B}", "B", 1),
    (r"\boxed{\text{(B)}}", "B", 1),
    ("The answer is (B).", "B", 1),
    ("The correct answer is B. 12 apples.", "B", 1),
    ("**Answer:** C", "B", 0),
    ("<answer>b</answer>", "B", 1),
    ("<answer>A</answer> no: <answer>B</answer>", "B", 1),
    ("Answer: option B", "B", 1),
    ("A is wrong.\nB", "B", 1),
    ("A is wrong.\nB) because it is blue", "B", 1),
    ("The answer is A or B.", "B", 0),
    (r"\boxed{A} \boxed{B}", "B", 0),
    (r"\boxed{A, B}", "B", 0),
    ("I do not know", "I", 0),
    ("Because it is blue", "B", 0),
    ("", "B", 0),
    ("B", 1, 1),
    ("B", 1.0, 1),
    ("B", "(B)", 1),
    ("D", ["A", "D"], 1),
]


@pytest.mark.parametrize(("response", "truth", "score"), CHOICES)
def test_multiple_choice_reads_the_letter_of_the_answer(response, truth, score):
    assert multiple_choice("s", response, truth, None) == score
    with pytest.raises(DataError, match="letter of a choice"):
        read_choice("forty-two")


QUESTIONS = [
    ("<answer>The Beatles</answer>", ["beatles"], 1, 1),
    ("<answer>beatles!</answer>", {"target": ["The Beatles", "Fab Four"]}, 1, 1),
    ("I think <answer>the early Beatles</answer>", "Beatles", 0, 2 / 3),
    ("The Beatles", "Beatles", 1, 1),
    ("It is the Beatles", "Beatles", 0, 0.5),
    ("<answer></answer>", "Beatles", 0, 0),
    ("<answer>Stones", "Beatles", 0, 0),
    ("<answer>42</answer>", 42.0, 1, 1),
]


@pytest.mark.parametrize(("response", "truth", "same", "overlap"), QUESTIONS)
def test_search_qa_compares_words(response, truth, same, overlap):
    assert search_qa("s", response, truth, None) == same
    assert search_qa("s", response, truth, None, qa_metric="f1") == pytest.approx(overlap)
    with pytest.raises(ConfigError, match="knows em and f1"):
        search_qa("s", response, truth, None, qa_metric="x")


COUNTDOWNS = [
    ("<answer>(44 - 19) * 3 + 35 - 12</answer>", {"target": 98, "numbers": [44, 19, 3, 35, 12]}, 1),
    (r"\boxed{44 + 19 + 35}", {"target": 98, "numbers": [44, 19, 35]}, 1),
    ("<answer>44 + 19 + 35 = 98</answer>", {"target": 98, "nums": [44, 19, 35]}, 1),
    ("<answer>44 + 19 + 35 = 99</answer>", {"target": 98, "numbers": [44, 19, 35]}, 0.1),
    ("<answer>44 + 54</answer>", {"target": 98, "numbers": [44, 19, 35]}, 0.1),
    ("<answer>98</answer>", {"target": 98, "numbers": [44, 19, 35]}, 0.1),
    ("<answer>35 + 44 - 19</answer>", {"target": 98, "numbers": [44, 19, 35]}, 0.1),
    ("<answer>8 ÷ (3 - 8 / 3)</answer>", {"target": 24.0, "numbers": [3.0, 3.0, 8.0, 8.0]}, 1),
    (r"<answer>\frac{8}{2} \times 3</answer>", json.dumps({"target": 12, "numbers": [8, 2, 3]}), 1),
    ("<answer>8 ** 2</answer>", {"target": 64, "numbers": [8, 2]}, 0),
    ("<answer>1 / (2 - 2)</answer>", {"target": 1, "numbers": [1, 2, 2]}, 0),
    ("<answer>__import__('os')</answer>", {"target": 1, "numbers": [1]}, 0),
    ("<answer>" + "(" * 400 + "</answer>", {"target": 1, "numbers": [1]}, 0),
    ("44 + 19 + 35", {"target": 98, "numbers": [44, 19, 35]}, 0),
    ("", {"target": 98, "numbers": [44]}, 0),
]


@pytest.mark.parametrize(("response", "task", "score"), COUNTDOWNS)
def test_countdown_evaluates_the_expression(response, task, score):
    assert countdown("s", response, task, None, format_score=0.1) == pytest.approx(score)


@pytest.mark.parametrize(
    "truth", [None, "98", {"target": 98}, {"target": 98, "numbers": []}, {"numbers": [1]}], ids=repr
)
def test_a_countdown_without_its_task_is_an_error(truth):
    with pytest.raises(DataError, match="a task of Countdown is"):
        countdown("s", "<answer>1</answer>", truth, None)


FOLLOWED = {
    "keywords:existence": ({"keywords": ["cat", "dog"]}, "A Cat and a dog.", "Cats and dog."),
    "keywords:frequency": (
        {"keyword": "cat", "frequency": 2.0, "relation": "less than"},
        "one cat",
        "cat cat",
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["cat"]}, "a dog; concatenate", "a cat"),
    "keywords:letter_frequency": (
        {"letter": "z", "let_frequency": 2, "let_relation": "at least"},
        "Zzz",
        "z",
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "at least"},
        'He paid 3.50 to Dr. Who. "Why?" she said',
        "He paid 3.50 to Dr. Who.",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "at least"},
        "It's well-known, yes.",
        "two words",
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First.\n\n**Then**, more.",
        "Then.\n\nFirst.",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] of [place]", "[name]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Bye.\nP.S. More", "Bye. PS"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
    "detectable_format:constrained_response": ({}, "My answer is yes.", "Yes."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and **b**", "*a* and b"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<A title>>\ntext", "<<>> text"),
    "combination:two_responses": ({}, "a\n******\nb", "a\n******\na"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it"}, "say it\nit", "It"),
    "startend:end_checker": ({"end_phrase": "Is that all?"}, 'Yes. "Is that all?"', "Is that all? Yes"),
    "startend:quotation": ({}, '"all of it"', 'all "of it"'),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        "THIS IS so",
        "THIS is so",
    ),
    "change_case:english_capital": ({}, "ALL 3!", "All"),
    "change_case:english_lowercase": ({}, "all 3!", "All"),
    "punctuation:no_comma": ({}, "a; b", "a, b"),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_an_instruction_is_followed_by_one_text_and_not_by_the_other(name):
    arguments, right, wrong = FOLLOWED[name]
    filled = {
        **dict.fromkeys(("num_words", "keyword", "end_phrase")),
        **arguments,
    }  # as parquet fills structs
    truth = {"instruction_id_list": [name, "punctuation:no_comma"], "kwargs": [filled, {}]}
    both = [
        ifeval("s", text, {**truth, "instruction_id_list": [name], "kwargs": [filled]}, None)
        for text in (right, wrong)
    ]
    assert [one["score"] for one in both] == [1, 0]
    assert ifeval("s", "", truth, None)["score"] == 0
    share = ifeval("s", wrong.replace(",", "") + "", json.dumps(truth), None, ifeval_score="share")["score"]
    assert share in (0.5, 1.0)


def test_all_instructions_of_the_data_set_are_tested():
    assert set(FOLLOWED) | {LANGUAGE} == set(CHECKS) and len(CHECKS) == 25


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (None, "instructions of IFEval are"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}, {}]}, "as many of both"),
        (
            {"instruction_id_list": ["keywords:existance"], "kwargs": [{}]},
            "'keywords:existance' is none that",
        ),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{}]},
            "'keywords:existence' has the arguments",
        ),
        ({"instruction_id_list": [], "kwargs": []}, "no instructions"),
    ],
)
def test_instructions_that_cannot_be_checked_are_an_error(truth, message):
    with pytest.raises(DataError, match=message):
        read_instructions(truth)


DAPO = [
    ("Let me see.\nAnswer: 34", "34", 1),
    ("Answer: $34$", "34", 1),
    ("**Answer:** 034.", "34", 1),
    ("answer: \\frac{68}{2}", 34.0, 1),
    ("Answer: 33\nAnswer: 34", "34", 1),
    ("Answer: 34\nAnswer: 33", "34", 0),
    (r"so \boxed{34}", "34", 1),
    (r"\boxed{33}. Answer: 34", "34", 1),
    ("Answer: 34" + " and so on" * 100, "34", 0),
    ("it is 34", "34", 0),
    ("34", "34", 0),
    ("Answer: ", "34", 0),
    ("", "34", 0),
]


@pytest.mark.parametrize(("response", "truth", "score"), DAPO)
def test_math_dapo_reads_the_line_of_the_answer(response, truth, score):
    assert math_dapo("s", response, truth, None) == score
