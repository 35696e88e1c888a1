"""The dataset: an immutable, content-addressed directory of SafeTensors slices. It knows no network."""
