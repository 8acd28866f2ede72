"""What a rank does around a step."""

from types import SimpleNamespace

from rl.trainer import start


def test_ranks_meet_before_weights_are_gathered(monkeypatch):
    """Rank 0 may wait an hour for an orchestrator that is away; the others waited in a group that gives up after 10 or 30 minutes."""
    calls = []

    def noted(name):
        return lambda *_: calls.append(name)

    monkeypatch.setattr(start.versions, "snapshot", noted("gather"))
    monkeypatch.setattr(start.determinism, "conditions", noted("conditions"))
    monkeypatch.setattr(start, "mode_of", noted("mode"))
    world, settings = SimpleNamespace(barrier=noted("meet")), SimpleNamespace(data=SimpleNamespace(fake=None))
    learner = SimpleNamespace(world=world, settings=settings, model=None)
    trainer = SimpleNamespace(learner=learner, step=1, version=None, base=None, status=SimpleNamespace(enter=lambda *_: None))
    trainer.config = SimpleNamespace(model=SimpleNamespace(dtype="float32"))
    trainer.publisher, trainer.saver = SimpleNamespace(finish=noted("finish"), start=noted("start")), SimpleNamespace(step=0, began=0)
    start.Trainer.publish(trainer)
    assert [name for name in calls if name not in ("mode", "conditions")] == ["finish", "meet", "gather", "start"]
