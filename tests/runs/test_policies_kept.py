"""Policies whose files retention keeps. Other libraries can load the kept files."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.jobs import bundles_of


def test_retention_keeps_the_initial_and_the_two_newest_policies(reference):
    for key in ("policy/initial", "it-0002/update", "it-0003/update"):
        model = AutoModelForCausalLM.from_pretrained(bundles_of(reference.run, key)["weights"])
        assert model.num_parameters() > 0
        assert AutoTokenizer.from_pretrained(bundles_of(reference.run, key)["weights"]).eos_token


def test_retention_deletes_the_files_of_an_older_policy_but_not_its_manifest(reference):
    assert not list(bundles_of(reference.run, "it-0001/update")["weights"].glob("*"))
    retired = bundles_of(reference.run, "it-0001/update")["weights"].name
    assert (reference.run / f"manifests/retention/{retired}.json").exists()
