"""Which policies keep their files, and that what is kept is a model that anybody can load."""

import json

from transformers import AutoModelForCausalLM, AutoTokenizer


def weights(run, key):
    """Directory of the weights that a manifest of a run names."""
    manifest = json.loads((run / f"manifests/{key}.json").read_text())
    return run / manifest["bundles"]["weights"]["key"]


def test_the_first_and_the_two_newest_policies_are_kept_and_load_as_any_model(reference):
    for key in ("policy/initial", "it-0002/update", "it-0003/update"):
        model = AutoModelForCausalLM.from_pretrained(weights(reference.run, key))
        assert model.num_parameters() > 0
        assert AutoTokenizer.from_pretrained(weights(reference.run, key)).eos_token


def test_an_older_policy_gives_its_files_back_and_keeps_its_manifest(reference):
    assert not list(weights(reference.run, "it-0001/update").glob("*"))
    retired = weights(reference.run, "it-0001/update").name
    assert (reference.run / f"manifests/retention/{retired}.json").exists()
