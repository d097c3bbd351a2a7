"""Cross-validate and pickle a scikit-learn pipeline whose last step trains on four workers."""

import pickle
from pathlib import Path

from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from edgeasync.sklearn import EdgeClassifier

x, y = load_breast_cancer(return_X_y=True, as_frame=False)
pipeline = make_pipeline(StandardScaler(), EdgeClassifier(hidden=(16,), workers=4, random_state=0))
scores = cross_val_score(pipeline, x, y, cv=3)
print("accuracy of the three folds:", " ".join(f"{score:.1%}" for score in scores))

Path("tumours.pickle").write_bytes(pickle.dumps(pipeline.fit(x, y)))
again = pickle.loads(Path("tumours.pickle").read_bytes())  # noqa: S301 - this script wrote it
print("the first three, read again:", again.predict(x[:3]), "chances", again.predict_proba(x[:3])[:, 1].round(2))
