from pmlip.hints import did_you_mean


def test_a_close_name_is_offered_and_a_distant_one_is_not():
    assert did_you_mean("blib", ["p", "blip"]) == "; did you mean 'blip'?"
    assert did_you_mean("something", ["p", "blip"]) == ""
