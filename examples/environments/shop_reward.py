"""The reward of the shopper: half for asking for what is wanted, half for saying what the tool answered."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """asked and said are 0 or 1; any call and any number are a first step."""
    said = [message for message in extra_info["conversation"] if message["agent"] is not None]
    prices = [m["content"] for m in extra_info["conversation"] if m["role"] == "tool" and "error" not in m]
    asked = bool(prices) * (1.0 if f'"{extra_info["wanted"]}"' in said[0]["content"] else 0.2)
    answer = said[-1]["content"].strip()
    repeated = 1.0 if answer in prices else 0.2 * answer.isdigit()
    right = float(asked == repeated == 1.0)
    return {"score": (asked + repeated) / 2, "right": right}
