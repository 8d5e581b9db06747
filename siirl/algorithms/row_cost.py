"""How much work a row is for a transformer: what balancing goes by, over ranks and over micro-batches."""


def row_cost(length, hidden_size: int = 2048):
    """Relative cost of one pass over a row of `length` tokens; an int gives an int, a tensor a tensor.

    Per layer, forward: the matrices of a dense block take about 2 * 12 h^2 FLOPs a token, causal attention
    over L tokens about 2 h L^2 in all. Divided by 2 h: 12 h L + L^2. Rows of zero tokens cost nothing. No
    communication. Source: Kaplan et al., "Scaling Laws for Neural Language Models" (2020), table 1, with
    causal attention halved.
    """
    return length * (12 * hidden_size + length)
