"""How good frozen features are: linear probe and nearest class mean on a data set's own split.

python -m benchmarks.probe dataset=digits
"""

import argparse

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from server_app.run_keys import read_words
from task.config.parsing import parse
from task.config.schema import Config
from task.keys import ConfigError
from task.models.evaluation import extract_features
from task.models.model import build_model
from task.scenario.scenario import build_scenario


def probe(config: Config) -> dict[str, float]:
    """Test accuracy of both classifiers on the backbone's features q(x), trained on all training images."""
    model, data = build_model(config, []), build_scenario(config).dataset
    train = extract_features(model, data.train_images, np.arange(len(data.train_labels))).cpu().numpy()
    test = extract_features(model, data.test_images, np.arange(len(data.test_labels))).cpu().numpy()
    linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)).fit(train, data.train_labels)
    nearest = NearestCentroid().fit(train, data.train_labels)
    return {
        "linear_probe": float(linear.score(test, data.test_labels)),
        "nearest_class_mean": float(nearest.score(test, data.test_labels)),
    }


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="run keys")
    try:
        config = parse({"prompt": "none", "method": "ncm"} | read_words(parser.parse_args().words))
        print(probe(config))
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    _main()
