"""Whatever may stand in a ledger, in whatever order: strategies for tests of folds that must survive all of it."""

from hypothesis import strategies as st

from ckptd.core import events as ev

times = st.floats(-1e6, 1e9) | st.floats(allow_nan=True, allow_infinity=True)
amounts = st.floats(-10, 1e4) | st.floats(allow_nan=True, allow_infinity=True)
attempts = st.none() | st.integers(1, 4)
nodes = st.sampled_from([None, "a", "b", "c"])
steps = st.integers(0, 6)


def some(cls, t, **values):
    return st.builds(cls, t=t, attempt=attempts, node=nodes, **values)


def any_event(t):
    return st.one_of(
        some(ev.DaemonStarted, t),
        some(ev.Requested, t, request=st.sampled_from(["save", "stop", "stop_now", "relaunch"])),
        some(ev.RunEnded, t),
        some(ev.AgentLost, t),
        some(
            ev.AttemptLaunched,
            t,
            world_size=st.integers(-1, 8),
            devices_wanted=st.integers(-1, 8),
            placement=st.dictionaries(st.sampled_from("ab"), st.just([0])),
            resume=st.none() | st.fixed_dictionaries({"step": steps, "attempt": attempts}) | st.just({}),
        ),
        some(ev.WorkersStarted, t, warm=st.booleans()),
        some(ev.WorkersInitialised, t),
        some(ev.StateRestored, t),
        some(ev.FirstStep, t),
        some(ev.Progress, t),
        some(ev.SaveStaged, t, step=steps, stall_s=amounts),
        some(ev.SaveCommitted, t, step=steps, stall_s=amounts),
        some(ev.SaveFailed, t, step=steps, stall_s=amounts),
        some(ev.SaveRejected, t, step=steps, stall_s=amounts),
        some(ev.FailureDetected, t, detected_t=t),
        some(ev.WorkersFinished, t, closed=st.booleans(), stopping=st.booleans()),
        some(ev.AttemptEnded, t),
        some(ev.Interrupted, t, planned=st.booleans()),
        some(ev.Restarted, t),
        some(ev.Noted, t),
    )
