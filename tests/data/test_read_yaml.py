"""YAML files are parsed once for each text, and what one caller changes another does not see."""

from __future__ import annotations

from fedcl_bench.data import plain_yaml, source


def test_a_text_is_parsed_once_and_a_changed_file_again(tmp_path, monkeypatch):
    parsed, original = [], plain_yaml.yaml.load

    def load(text, Loader):
        parsed.append(text)
        return original(text, Loader=Loader)
    monkeypatch.setattr(plain_yaml.yaml, "load", load)
    plain_yaml.parsed.cache_clear()
    file = tmp_path / "a.yaml"
    file.write_text("lists: [1, 2]\n")
    source.read_yaml(file)["lists"].append(3)
    assert source.read_yaml(file) == {"lists": [1, 2]} and len(parsed) == 1
    file.write_text("lists: [4]\n")
    assert source.read_yaml(file) == {"lists": [4]} and len(parsed) == 2
