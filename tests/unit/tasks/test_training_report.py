"""Reports about training on data: the loss on held-out chats in the log and in the points of trackers."""

from rheostat.infra.store.manifests import Manifest, provenance_here
from rheostat.tasks.preparation import describe_losses
from rheostat.tasks.tracking.points import chat_scalars


def build_training(**metrics):
    detail = {"losses": [3.0, 2.5]}
    return Manifest(
        key="policy/sft", metrics=metrics, detail=detail, provenance=provenance_here(seconds={"stage": 4.0})
    )


def test_a_training_on_chats_is_described_with_the_loss_on_held_out_chats():
    trained = build_training(heldout_chats=20, heldout_loss_first=3.25, heldout_loss=2.5)
    assert describe_losses(trained) == (
        "loss 3.000 2.500 after 4 s; loss on 20 held-out chats 3.250 before, 2.500 after"
    )
    assert chat_scalars(trained) == {"warmup/heldout_loss": 2.5, "warmup/heldout_loss_first": 3.25}


def test_a_training_without_held_out_chats_has_no_loss_on_them():
    assert describe_losses(build_training(loss_last=2.5)) == "loss 3.000 2.500 after 4 s"
    assert chat_scalars(build_training(loss_last=2.5)) == {}


def test_held_out_completions_with_labels_are_not_called_pairs():
    trained = build_training(heldout_pairs=4, heldout_accuracy=0.75, heldout_margin=1.5)
    assert describe_losses(trained, "completion").endswith("accuracy 0.750 on 4 held-out completions, margin 1.50")
    assert describe_losses(trained).endswith("accuracy 0.750 on 4 held-out pairs, margin 1.50")
