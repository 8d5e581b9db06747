"""Rows for tests of rewards."""

from siirl.data.rows import make_rows


def rows_of(tokenizer, responses, truths=None, source="arithmetic", eos=True):
    """Rows as a reward function gets them: the tokens of the responses, with an end where `eos`."""
    ids = [tokenizer(text)["input_ids"] + [1] * eos for text in responses]
    return make_rows(
        {
            "response_ids": ids,
            "response_length": [len(row) for row in ids],
            "data_source": [source] * len(ids),
            "ground_truth": truths or ["42"] * len(ids),
            "extra_info": [{"index": index} for index in range(len(ids))],
            "sample_index": [100 + index for index in range(len(ids))],
        }
    )
