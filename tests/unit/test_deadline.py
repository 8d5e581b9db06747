import time

from siirl.deadline import Deadline


def test_a_deadline_counts_from_its_last_renewal_and_is_due_once(monkeypatch):
    now_s, slept = [100.0], []

    def sleep(wait_s):
        slept.append(wait_s)
        now_s[0] += wait_s

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", sleep)
    wait = Deadline(2.0)
    now_s[0] += 1.5
    assert (wait.passed_s, wait.left_s, wait.over, wait.due()) == (1.5, 0.5, False, False)
    wait.renew()
    now_s[0] += 2.0
    assert (wait.left_s, wait.over) == (0.0, True)
    assert wait.due() and not wait.due() and wait.left_s == 2.0
    assert not wait.until(lambda: False, 0.75) and slept == [0.75, 0.75, 0.5]
    assert wait.until(lambda: True, 0.75) and len(slept) == 3  # what is done is done, also late
