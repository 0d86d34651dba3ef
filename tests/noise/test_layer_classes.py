import pickle

from pmlip.nbody.egnn import EGNNConfig
from pmlip_bench.nbody.methods import PBLIP


def test_a_layer_of_two_methods_can_be_pickled():
    method = PBLIP(EGNNConfig(layers=2, width=8))
    again = pickle.loads(pickle.dumps(method))
    assert type(again.egnn.layers[0].edge.first) is type(method.egnn.layers[0].edge.first)
    assert again.state_dict().keys() == method.state_dict().keys()
