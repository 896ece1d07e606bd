"""Data files: what is read, and what a person is told about a file that cannot be read."""

import errno
import gzip
import io
import os
import sys
import threading
import zipfile
from decimal import Decimal
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxcmle.apps import text
from jaxcmle.apps.tables import DataError, Table, read_table

PRECISIONS = ("float32",)

IRIS = b"length,width,species\n5.1,3.5,setosa\n4.9,3.0,setosa\n"


def read(content, **options):
    """Read bytes, or text, as the standard input."""
    data = content.encode() if isinstance(content, str) else content
    return read_table("-", stdin=io.BytesIO(data), **options)


def error(content, **options):
    """Return what is wrong with the standard input, without its name."""
    with pytest.raises(DataError) as caught:
        read(content, **options)
    message = str(caught.value)
    assert len(message) <= 300
    assert "\n" not in message
    return message.removeprefix("standard input: ")


def saved(array, save=np.save, **options):
    stream = io.BytesIO()
    save(stream, array, **options)
    return stream.getvalue()


def archived(**arrays):
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def parquet(columns, names=None):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    stream = io.BytesIO()
    arrays = [pa.array(column) for column in columns]
    parquet.write_table(pa.table(arrays, names=names or list("abcdefgh")[: len(arrays)]), stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("1,2\n3,4\n", None),
        ("a,b\n1,2\n3,4\n", ["a", "b"]),
        ("a;b\n1;2\n3;4\n", ["a", "b"]),
        ("a\tb\n1\t2\n3\t4\n", ["a", "b"]),
        ("a  b\n 1 2\n3 \t 4 \n", ["a", "b"]),
        ("a, b\n1, 2\n3, 4", ["a", "b"]),
        ("a,b\r\n1,2\r\n3,4\r\n", ["a", "b"]),
        ("a,b\r1,2\r3,4\r", ["a", "b"]),
        ("# by me, you\n\na,b\n1,2\n  # and\n\n3,4\n\n", ["a", "b"]),
        ('"a","b"\n"1","2"\n"3",4\n', ["a", "b"]),
        ('"a, the ""first"" one","b\n\n#c"\n"1", "2"\n3,4\n', ['a, the "first" one', "b\n\n#c"]),
        ('"a b" c\n1 "2"\n3 4\n', ["a b", "c"]),
        ("a;b\n1,0;2,0\n3;4,\n", ["a", "b"]),
        ("a\tb\n1,0\t2,0\n3\t4e0\n", ["a", "b"]),
        ("a,\n1,2\n3,4\n", ["a", "column 2"]),
        ("a,a\n1,2\n3,4\n", ["a", "a"]),
        ("x,7\n1,2\n3,4\n", ["x", "7"]),
        ("größe,b\n1,2\n3,4\n", ["größe", "b"]),
    ],
)
def test_texts(content, names):
    for encoded in (content.encode(), content.encode("utf-8-sig"), content.encode("utf-16")):
        table = read(encoded)
        np.testing.assert_array_equal(table.x, [[1, 2], [3, 4]])
        assert table.x.dtype == np.float64
        assert table.names == names
        assert table.weight is None
        assert table.rows.tolist() == [0, 1]
        assert (table.total_rows, table.dropped) == (2, 0)


def test_one_column():
    assert read("1\n2\n3\n").x.tolist() == [[1], [2], [3]]
    assert read("body length\n2\n3\n").names == ["body length"]
    assert read("7").x.tolist() == [[7]]


def test_delimiter_is_found_though_others_occur():
    assert read("1,5;2,5\n3,5;4,5\n").x.tolist() == [[1.5, 2.5], [3.5, 4.5]]
    assert read('a,b\n"1;2",3\n"x;y",4\n', columns="b").x.tolist() == [[3], [4]]
    assert read("when,x\n1-1 10:00,3\n2-1 11:00,4\n", columns="x").x.tolist() == [[3], [4]]
    assert read("Ann; Bo,3\nCy; Di,4\n", columns="2").x.tolist() == [[3], [4]]


@pytest.mark.parametrize(
    ("delimiter", "content"),
    [("|", "1|2"), ("tab", "1\t2"), ("\\t", "1\t2"), ("\t", "1\t2"), (" ", "1  2"), (":", "1:2")],
)
def test_given_delimiter(delimiter, content):
    assert read(content, delimiter=delimiter).x.tolist() == [[1, 2]]


def test_given_header():
    assert read("2019,2020\n1,2\n").total_rows == 2
    assert read("2019,2020\n1,2\n", header=True).names == ["2019", "2020"]
    assert read("# years\n\n2019,2020\n1,2\n", header=True).x.tolist() == [[1, 2]]
    assert read("NA,2\n1,2\n", header=False, drop_missing=True).rows.tolist() == [1]


def test_header_is_one_if_only_that_gives_what_is_asked_for():
    assert read("2019,2020\n1,2\n", columns="2020").x.tolist() == [[2]]
    # The words of a column that is not wanted say nothing.
    assert read("7,a\n1,2\n", columns="1").x.tolist() == [[7], [1]]


def test_odd_number_in_the_first_row_does_not_vanish_as_a_header():
    for odd in ("1_000", "0x10", "12:30", "1 2", "1.2.3", "-5cm"):
        assert error(f"{odd},2\n3,4\n5,6\n").startswith(f"row 1, column 1: '{odd}' is not")


@pytest.mark.parametrize("suffix", ["csv", "txt", "dat", "CSV", "csv.gz", "unknown", "gz"])
def test_files(tmp_path, suffix):
    path = tmp_path / f"data.{suffix}"
    content = b"a,b\n1,2\n"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    for source in (path, str(path)):
        assert read_table(source).x.tolist() == [[1, 2]]


def test_tsv_has_tabs(tmp_path):
    for path in (tmp_path / "data.tsv", tmp_path / "data.tsv.gz"):
        content = b"a b\tc\n1\t\n\t\n"
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        with pytest.raises(DataError, match="3 missing values in 2 of 2 rows"):
            read_table(path)
    assert read("1\t2\n", kind="tsv").x.tolist() == [[1, 2]]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b"1,2\n",))
    writer.start()
    assert read_table(path).x.tolist() == [[1, 2]]
    writer.join()


def test_standard_input_of_the_process(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1,2\n")))
    assert read_table("-").x.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", "float32"),
        (">f4", "float32"),
        ("float16", "float32"),
        ("float64", "float64"),
        (">f8", "float64"),
        ("longdouble", "float64"),
        ("int32", "float64"),
        ("uint8", "float64"),
        ("bool", "float64"),
    ],
)
def test_numpy(tmp_path, dtype, expected):
    x = np.array([[1, 0], [1, 1], [0, 1]], dtype)
    contents = {"npy": saved(x), "npz": archived(points=x), "npy.gz": gzip.compress(saved(x))}
    for suffix, content in contents.items():
        path = tmp_path / f"x.{suffix}"
        path.write_bytes(content)
        for table in (read_table(path), read(content)):
            np.testing.assert_array_equal(table.x, x.astype(expected))
            assert table.x.dtype == np.dtype(expected)
            assert table.x.dtype.isnative
            assert table.names is None
    table = read(saved(np.asfortranarray(x)), columns=[2], weight_column=1)
    np.testing.assert_array_equal(table.x, x[:, 1:].astype(expected))
    np.testing.assert_array_equal(table.weight, x[:, 0].astype(expected))


def test_arrays_of_an_archive():
    one, two = np.ones((2, 2)), np.full((3, 2), 2.0)
    assert read(archived(labels=np.arange(2), points=one)).x.tolist() == one.tolist()
    for name in ("x", "X", "data"):
        assert read(archived(**{"other": one, name: two})).x.tolist() == two.tolist()
    assert read(archived(other=one, x=two), array="other").x.tolist() == one.tolist()
    objects = np.array([[None]])
    assert read(archived(objects=objects, x=one), array="x").x.tolist() == one.tolist()


def test_parquet(tmp_path):
    content = parquet([[1, None, 3], [1.5, 2.5, 3.5], ["u", "v", "w"], [True, False, None]])
    table = read(content, exclude="c", drop_missing=True)
    assert table.x.tolist() == [[1, 1.5, 1]]
    assert table.x.dtype == np.float64
    assert table.names == ["a", "b", "d"]
    assert (table.rows.tolist(), table.total_rows, table.dropped) == ([0], 3, 2)
    path = tmp_path / "data.parquet"
    path.write_bytes(content)
    assert read_table(path, columns="b").x.tolist() == [[1.5], [2.5], [3.5]]
    single = [np.array([1, 2], "float32"), np.array([3, 4], "float32"), np.array([5, 6])]
    table = read(parquet(single), columns="2,1", weight_column="c")
    assert table.x.dtype == np.float32
    assert table.x.tolist() == [[3, 1], [4, 2]]
    assert table.weight.tolist() == [5, 6]
    odd = [[Decimal("1.5"), Decimal(2)], np.array([1, 2], "float16"), [2**63 - 1, 0]]
    assert read(parquet(odd)).x.tolist() == [[1.5, 1, 2.0**63], [2, 2, 0]]
    assert read(parquet(odd), columns="b").x.dtype == np.float32
    same = read(parquet([[1], [2], [3]], names=["a", "b", "a"]), columns="3,1")
    assert same.x.tolist() == [[3, 1]]


WIDE = "id,length,2,x y,w\n1,2,3,4,5\n6,7,8,9,0\n"


@pytest.mark.parametrize(
    ("options", "features"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"columns": "length,5"}, [2, 5]),
        ({"columns": "5, length"}, [5, 2]),
        ({"columns": "3-5,1"}, [3, 4, 5, 1]),
        ({"columns": "2"}, [3]),
        ({"columns": [2]}, [2]),
        ({"columns": ["2", "x y"]}, [3, 4]),
        ({"columns": "1-5", "exclude": "3-4"}, [1, 2, 5]),
        ({"exclude": ["id", 5]}, [2, 3, 4]),
        ({"exclude": "id,id"}, [2, 3, 4, 5]),
        ({"exclude": ""}, [1, 2, 3, 4, 5]),
        ({"weight_column": "w"}, [1, 2, 3, 4]),
        ({"weight_column": 5, "columns": "3-5"}, [3, 4]),
        ({"weight_column": "5", "exclude": "w,1"}, [2, 3, 4]),
    ],
)
def test_chosen_columns(options, features):
    # The third column is called "2", and a name wins over a number.
    full = np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]])
    table = read(WIDE, **options)
    places = [feature - 1 for feature in features]
    assert table.x.tolist() == full[:, places].tolist()
    names = ["id", "length", "2", "x y", "w"]
    assert table.names == [names[place] for place in places]
    if "weight_column" in options:
        assert table.weight.tolist() == [5, 0]


def test_a_name_with_a_comma_is_quoted():
    assert read('"a,b",c\n1,2\n', columns='"a,b"').x.tolist() == [[1]]
    assert read('"a,b",c\n1,2\n', columns=["a,b"]).x.tolist() == [[1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"columns": "Lenght"},
            "--columns 'Lenght' is no column; there are 'length', 'id', '2', 'x y', 'w'",
        ),
        ({"exclude": "z"}, "--exclude 'z' is no column; there are 'id', 'length', '2', 'x y', 'w'"),
        ({"columns": "6"}, "--columns '6' is no column; their numbers are 1 to 5"),
        ({"columns": "0-2"}, "--columns '0-2' is no column; their numbers are 1 to 5"),
        ({"columns": "4-3"}, "--columns '4-3' is no column; their numbers are 1 to 5"),
        ({"columns": [-1]}, "--columns '-1' is no column; there are"),
        ({"columns": "9" * 9999}, "--columns '999999999999999999999999999...' is no column; there"),
        ({"columns": "1-4,length"}, "--columns has column 2 ('length') more than once"),
        ({"columns": ""}, "--columns names no column"),
        ({"exclude": "1-5"}, "none of the 5 columns is left for the points; change --columns, "),
        ({"columns": "w", "weight_column": "w"}, "none of the 5 columns is left for the points"),
        ({"weight_column": "1-3"}, "--weight-column '1-3' is more than one column"),
        ({"weight_column": "mass"}, "--weight-column 'mass' is no column; there are"),
    ],
)
def test_wrong_columns(options, message):
    assert error(WIDE, **options).startswith(message)


def test_wrong_columns_without_names_or_with_the_same():
    problem = error("1,2\n", columns="length")
    assert problem == (
        "--columns 'length' is no column: the columns have no names; choose by number, 1 to 2"
    )
    assert error("a,b,a\n1,2,3\n", columns="a") == (
        "--columns 'a' is the name of columns 1 and 3; choose by number"
    )
    assert read("a,b,a\n1,2,3\n", columns="3").x.tolist() == [[3]]


def test_very_many_columns():
    names = ",".join(f"column_{number}" for number in range(20_000))
    assert "'column_20'" in error(f"{names}\n{'1,' * 19_999}1\n", columns="colunm_20")
    assert "--columns column_0,column_1," in error(f"{names}\n{'1,' * 19_999}x\n")


GAPS = ["", " ", '""', "NA", "N/A", "n/a", "#N/A", "<NA>", "n.a.", "NaN", "nan", "-nan"]
GAPS += ["null", "NULL", "None", "?", ".", "-", "--"]


@pytest.mark.parametrize("cell", GAPS)
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_missing(cell, delimiter):
    for rows in ([["1", "2"], ["3", cell]], [["1", "2"], [cell, "4"]]):
        content = "\n".join(delimiter.join(row) for row in rows)
        table = read(content, drop_missing=True)
        assert table.x.tolist() == [[1, 2]]
        assert (table.rows.tolist(), table.total_rows, table.dropped) == ([0], 2, 1)
        assert error(content).startswith("1 missing value in 1 of 2 rows (first: row 2, column ")


def test_missing_values_are_counted_and_found():
    content = "# made by hand\n\nlength,width,w\n1,2,3\n\n# next\n4,,6\n7,NA,\n8,9,1\n"
    assert error(content) == (
        "3 missing values in 2 of 4 rows (first: row 7, column 'width'); "
        "drop those rows with --drop-missing, or fill them in"
    )
    table = read(content, drop_missing=True, weight_column="w")
    assert table.x.tolist() == [[1, 2], [8, 9]]
    assert table.weight.tolist() == [3, 1]
    assert (table.rows.tolist(), table.total_rows, table.dropped) == ([0, 3], 4, 2)


def test_missing_weights_and_columns_that_are_not_wanted():
    assert read("a,b\n1,2\nNA,4\n", columns="b").dropped == 0
    problem = error("a,b\n1,2\n3,NA\n", weight_column="b")
    assert problem.startswith("1 missing value in 1 of 2 rows (first: row 3, column 'b')")


def test_missing_everywhere():
    assert error("1,2,\n3,4,\n", drop_missing=True) == (
        "2 missing values in 2 of 2 rows (first: row 1, column 3); "
        "leave out what is wholly empty with --exclude 3"
    )
    assert error("1,\n,4\n", drop_missing=True) == (
        "2 missing values in 2 of 2 rows (first: row 1, column 2); "
        "no row would be left: choose fewer columns with --columns, or fill them in"
    )


def test_missing_in_arrays():
    x = np.array([[1, 2], [3, np.nan], [np.nan, np.nan]], "float32")
    assert error(saved(x)).startswith("3 missing values in 2 of 3 rows (first: row 2, column 2);")
    table = read(saved(x), drop_missing=True)
    assert table.x.tolist() == [[1, 2]]
    assert table.x.dtype == np.float32
    problem = error(parquet([[1.0, None], [None, 2.0]]))
    assert problem.startswith("2 missing values in 2 of 2 rows (first: row 1, column 'b');")


@pytest.mark.parametrize("cell", ["inf", "-Infinity", "1e999"])
def test_infinite(cell):
    for options in ({}, {"drop_missing": True}, {"weight_column": "b"}):
        assert error(f"a,b\n\n1,2\n3,{cell}\n4,NA\n", **options) == (
            "row 4, column 2 ('b'): the value is infinite; correct it, or write NA if it is missing"
        )
    x = np.array([[1.0, float(cell)]])
    assert error(saved(x)).startswith("row 1, column 2: the value is infinite")


def test_weights():
    assert error("a,w\n1,0\n2,-0.5\n", weight_column="w") == (
        "row 3, column 2 ('w'): the weight -0.5 is negative; weights are 0 or more"
    )
    assert error("a,w\n1,heavy\n2,light\n", weight_column="w") == (
        "row 2, column 2 ('w'): 'heavy' is not a number; "
        "choose the column of the weights with --weight-column"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            IRIS,
            "row 2, column 3 ('species'): 'setosa' is not a number; choose the columns with "
            "--columns length,width or leave this out with --exclude species",
        ),
        (
            "1,2,setosa\n3,4,setosa\n",
            "row 1, column 3: 'setosa' is not a number; choose the columns with "
            "--columns 1,2 or leave this out with --exclude 3",
        ),
        (
            "id,body length,sex\nu,1,f\nv,2,m\n",
            "row 2, column 1 ('id'): 'u' is not a number; choose the columns with "
            "--columns 'body length' or leave these out with --exclude id,sex",
        ),
        (
            "# one\n\na,b\n1,2\n\n1,2\n1,x\n",
            "row 7, column 2 ('b'): 'x' is not a number; correct it, write NA if it is missing, "
            "or leave the column out with --exclude b",
        ),
        ("a,b\nu,v\n", "row 1, column 1: 'a' is not a number, and no column holds numbers"),
        (
            "1,5;2\n3;4,5\n1,5;2.5\n",
            "row 3, column 2: '2.5' is not a number like those before it; use decimal points or "
            "commas, not both",
        ),
        (
            "a;b\n1,5;u\n2,5;v\n",
            "row 2, column 2 ('b'): 'u' is not a number; choose the columns with "
            "--columns a or leave this out with --exclude b",
        ),
    ],
)
def test_no_number(content, message):
    assert error(content) == message


@pytest.mark.parametrize("cell", ["1_000", "0x10", "0x1p3", "1+2j", "1 # 2", "1#", "1d5", "--1"])
def test_odd_numbers(cell):
    assert f"row 3, column 2 ('b'): '{cell}' is not a number" in error(f"a,b\n1,2\n3,{cell}\n4,5")


def test_no_number_in_the_columns_that_are_wanted():
    problem = error(IRIS, columns="species")
    assert problem == (
        "row 2, column 3 ('species'): 'setosa' is not a number, "
        "and none of these columns holds numbers"
    )


def test_header_that_was_denied():
    assert error("a,b\n1,2\n3,4\n", header=False) == (
        "row 1, column 1: 'a' is not a number; if that row names the columns, say --header"
    )


@pytest.mark.parametrize(
    ("content", "delimiter", "advice"),
    [
        ("a;b\n1;2\n", ",", "is the delimiter ';'? try --delimiter ';'"),
        ("a\tb\n1\t2\n", ",", "is the delimiter a tab? try --delimiter tab"),
        ("a b\n1 2\n", "tab", "is the delimiter white space? try --delimiter space"),
        ("1,5;2,5\n3,5;4,5\n", ",", "is the delimiter ';'? try --delimiter ';'"),
        ("1,5;2,5\n3;4,5\n", ",", "is the delimiter ';'? try --delimiter ';'"),
    ],
)
def test_wrong_delimiter(content, delimiter, advice):
    assert error(content, delimiter=delimiter).endswith(advice)


@pytest.mark.parametrize("delimiter", ["", "ab", "1", "x", '"', ".", "\n", "#"])
def test_impossible_delimiter(delimiter):
    assert "cannot separate numbers; give one character" in error("1,2\n", delimiter=delimiter)


def test_files_that_cannot_be_opened(tmp_path):
    for path, problem in (
        (tmp_path / "none.csv", "no such file"),
        (tmp_path, "is a directory; name a file in it"),
        ("nul\0.csv", "no such file"),
    ):
        with pytest.raises(DataError, match=f": {problem}$"):
            read_table(path)
    # Whoever runs the tests may be allowed to read everything.
    for number, problem in (
        (errno.EACCES, "no permission to read it"),
        (errno.EIO, "cannot be read: Input/output error"),
    ):
        failure = OSError(number, os.strerror(number))
        failed = mock.patch("builtins.open", side_effect=failure)
        with failed, pytest.raises(DataError, match=f"data.csv: {problem}$"):
            read_table("data.csv")


def test_messages_name_the_file(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(IRIS)
    with pytest.raises(DataError, match=r"data\.csv: row 2, column 3"):
        read_table(path)
    with pytest.raises(DataError, match=r"^\.\.\.a{73}\.csv: no such file$"):
        read_table("a" * 200 + ".csv")
    with pytest.raises(DataError, match=r"^two\?lines: no such file$"):
        read_table("two\nlines")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (b"\n\n# nothing\n", "holds no rows"),
        (b'n,o\na b,1\nc d,2\n"e"f g,3\n', "row 4: the quotes or cells are malformed ("),
        (b"\xef\xbb\xbf", "holds no rows"),
        (b"a,b\n", "holds only a header (row 1) and no rows; if that row is data, say --no-header"),
        (b"1,2\n3,4\n\n5,6,7\n", "row 4 has 3 cells, the rows before it have 2"),
        (b"a,b\n\n# no\n1\n", "row 4 has 1 cell, the rows before it have 2"),
        (b'a,"b\nc"\n"1","\n2"\n1\n', "row 5 has 1 cell, the rows before it have 2"),
        (b"1,2\n3,\x004\n", "is no text: it contains NUL bytes"),
        (b"1,2\n3,\xff\n", "is no text: it is neither UTF-8 nor UTF-16; save it as UTF-8"),
        (b"\xff\xfe\x00", "is no text: it is neither UTF-8 nor UTF-16; save it as UTF-8"),
        (b'1,2\n3,"4\n5,6\n', "row 2: the quotes or cells are malformed (unexpected end of data)"),
        (b'1,2\n3,"4"5\n', "row 2: the quotes or cells are malformed ("),
        (b"1," + b"2" * 200_000 + b"x\n", "row 1: the quotes or cells are malformed (field larger"),
        (gzip.compress(b"1,2\n" * 99, mtime=0)[:-9], "is damaged: gzip cannot unpack it"),
        (gzip.compress(b"1,2\n" * 99, mtime=0)[:12] + b"junk", "is damaged: gzip cannot unpack it"),
        (b"\x1f\x8bjunk", "is damaged: gzip cannot unpack it"),
    ],
)
def test_bad_texts(content, message):
    assert error(content).startswith(message)
    # Also where the cells that are wrong are not wanted.
    if content[:2] == b"1,":
        assert error(content, columns="1", delimiter=",").startswith(message)


OBJECTS = np.array([[None]])
SQUARE = np.ones((2, 2))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(3), "its array has the shape (3,); reshape it: x.reshape(-1, 1) is one column"),
        (np.ones((1, 2, 3)), "its array has the shape (1, 2, 3); save the points as an array of"),
        (np.array(1.0), "its array has the shape (); save the points as an array of shape [n, d]"),
        (np.ones((2, 2), complex), "holds no plain numbers but complex128; save the points as"),
        (np.array([["a"]]), "holds no plain numbers but <U1; save the points as an array of"),
        (np.zeros(2, "f8,f4"), "holds no plain numbers but [('f0', '<f8'), ('f1', '<f4')]; save"),
        (np.zeros((2, 2), "M8[s]"), "holds no plain numbers but datetime64[s]; save the points"),
        (np.ones((3, 0)), "its array has no columns (shape (3, 0)); save the points as an array"),
        (np.ones((0, 3)), "holds no rows"),
        (OBJECTS, "holds Python objects and no numbers; save x.astype(float)"),
    ],
)
def test_bad_arrays(array, message):
    assert error(saved(array)).startswith(message)
    assert error(archived(x=array)).startswith(message)


@pytest.mark.parametrize("kind", ["npy", "npz", "parquet"])
def test_damaged_files(kind):
    whole = {
        "npy": lambda: saved(np.ones((9, 2))),
        "npz": lambda: archived(x=np.random.default_rng(0).normal(size=(99, 2))),
        "parquet": lambda: parquet([[1.0] * 99]),
    }[kind]()
    scratched = bytearray(whole)
    scratched[len(whole) // 2 :: 7] = b"?" * len(scratched[len(whole) // 2 :: 7])
    for content in (whole[:-20], whole[:12], b"1,2\n", bytes(scratched)):
        if kind == "npy" and content == bytes(scratched):
            continue  # Nothing in such a file can tell.
        assert error(content, kind=kind).startswith("is damaged, or no ")


def test_archives_without_the_array():
    assert error(archived(x=SQUARE, y=SQUARE), array="z") == (
        "--array 'z' is not there; choose from: x, y"
    )
    assert error(archived(a=SQUARE, b=SQUARE)) == "choose one of its arrays with --array: a, b"
    assert error(archived(a=np.ones(2), b=np.ones(2))).endswith("with --array: a, b")
    many = {f"a_rather_long_name_{number}": SQUARE for number in range(99)}
    assert error(archived(**many)).endswith("...")
    spreadsheet = io.BytesIO()
    with zipfile.ZipFile(spreadsheet, "w") as archive:
        archive.writestr("sheet.xml", "<xml/>")
    assert error(spreadsheet.getvalue()) == "holds no arrays of NumPy; save a spreadsheet as CSV"
    assert "holds no arrays" in error(archived())


def test_bad_parquet(monkeypatch):
    content = parquet([[1.0], ["u"], [[1.0]]])
    assert error(content) == (
        "column 2 ('b') holds no numbers but string; choose the columns with --columns a "
        "or leave these out with --exclude b,c"
    )
    assert error(content, columns="b").endswith("string; leave this out with --exclude b")
    assert error(content, columns="a", weight_column="b") == (
        "column 2 ('b') holds no numbers but string; "
        "choose the column of the weights with --weight-column"
    )
    assert error(parquet([])) == "has no columns"
    assert error(parquet([np.zeros(0)])) == "holds no rows"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert error(content) == ("to read Parquet install pyarrow: pip install 'jaxcmle[parquet]'")


def test_unknown_kind():
    assert error("1,2\n", kind="xlsx") == "--kind 'xlsx' is none of csv, tsv, npy, npz, parquet"


def test_messages_are_short():
    long = "long" * 1000
    for content in (f"{long},b\n{long},1\n", f"a,b\n1,2\n3,{long}\n", f"{long}\n{long}\n"):
        error(content)
        error(content, columns=long)
        error(content, header=True)
    error(archived(**{long: SQUARE, long + "2": SQUARE}))


def outcome(content, **options):
    """Return what comes of a content: a table as plain values, or the message."""
    try:
        table = read(content, **options)
    except DataError as caught:
        message = str(caught)
        assert len(message) <= 300
        assert message.isprintable()
        return message
    assert isinstance(table, Table)
    assert table.x.ndim == 2
    assert np.isfinite(table.x).all()
    assert len(table.x) == len(table.rows) == table.total_rows - table.dropped > 0
    weight = None if table.weight is None else table.weight.tolist()
    return table.x.tolist(), table.names, weight, table.rows.tolist(), table.total_rows


def careful_outcome(content, **options):
    """Return what comes of a content without NumPy's reader."""
    with mock.patch.object(text, "_read_simple", side_effect=ValueError):
        return outcome(content, **options)


MISSING = ("", "NA", "nan", "?", "null", "#N/A")
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9).map(float)


@st.composite
def tables(draw):
    """Draw a text with what it holds: names, and values with None where they are missing."""
    width = draw(st.integers(1, 4))
    delimiter = draw(st.sampled_from([",", ";", "\t", " "]))
    decimal = draw(st.sampled_from([".", ","])) if delimiter in ";\t" else "."
    gappy = draw(st.booleans())
    cell = numbers | st.none() if gappy else numbers
    rows = draw(st.lists(st.tuples(*[cell] * width), min_size=1, max_size=6))

    # Between spaces, or alone in its line, an empty cell cannot be seen.
    gaps = MISSING if width > 1 and delimiter != " " else MISSING[1:]

    def spelled(value):
        if value is None:
            word = draw(st.sampled_from(gaps))
        else:
            word = draw(st.sampled_from([repr(value), f"{value:.17e}"])).replace(".", decimal)
        return f'"{word}"' if draw(st.integers(0, 4)) == 0 else word

    lines = [delimiter.join(spelled(value) for value in row) for row in rows]
    names = None
    if draw(st.booleans()):
        names = [f"n{place}" for place in range(width)]
        quote = draw(st.sampled_from(["", '"']))
        lines.insert(0, delimiter.join(f"{quote}{name}{quote}" for name in names))
    for _ in range(draw(st.integers(0, 2))):
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(["", "# no, 1;"])))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    encoding = draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]))
    return (end.join(lines) + end).encode(encoding), delimiter, names, rows


@settings(deadline=None, max_examples=300)
@given(tables())
def test_both_readers_give_what_was_written(drawn):
    content, delimiter, names, rows = drawn
    whole = [place for place, row in enumerate(rows) if None not in row]
    for options in (
        {"delimiter": delimiter, "header": names is not None},
        {"delimiter": delimiter},
    ):
        got = outcome(content, drop_missing=True, **options)
        assert got == careful_outcome(content, drop_missing=True, **options)
        if not whole:
            assert "missing" in got
            continue
        # A word for a missing value is never taken for a name, and a name never for a value.
        assert got == ([list(rows[place]) for place in whole], names, None, whole, len(rows))
        strict = outcome(content, **options)
        count = sum(value is None for row in rows for value in row)
        assert strict == got if not count else f": {count} missing value" in strict


@settings(deadline=None, max_examples=300)
@given(tables())
def test_delimiter_is_found(drawn):
    content, _, names, rows = drawn
    if len(rows[0]) > 1 and all(None not in row for row in rows):
        whole = list(range(len(rows)))
        assert outcome(content) == ([list(row) for row in rows], names, None, whole, len(rows))


words = st.text(alphabet='01.,;\t "#\n-+eENAx_?\r\x1c\xa0١', max_size=40)
choices = st.fixed_dictionaries(
    {},
    optional={
        "delimiter": st.sampled_from([",", ";", "tab", "space", "|"]),
        "header": st.booleans(),
        "columns": st.sampled_from(["1", "2", "1-2", "x", "2,1"]),
        "exclude": st.sampled_from(["1", "2", "N"]),
        "weight_column": st.sampled_from(["1", "2"]),
        "drop_missing": st.booleans(),
    },
)


@settings(deadline=None, max_examples=1000)
@given(words, choices)
@example('1,"a\n#b",4\n5,"c",6\n', {"columns": "1"})
@example('"1,1",1\n1,1,1\n', {"columns": "1", "header": False})
@example('1\n""\n', {})
@example("1,1\n1,1,1\n", {"columns": "1"})
@example('1  "1"\n"1" 1', {"delimiter": "space"})
@example("1\x1c,1\n", {"delimiter": ","})
def test_readers_agree_on_anything(content, options):
    assert outcome(content, **options) == careful_outcome(content, **options)


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=60), st.sampled_from([None, "csv", "tsv", "npy", "npz", "parquet"]))
def test_random_bytes(content, kind):
    for start in (b"", b"\x93NUMPY\x01\x00", b"PK\x03\x04", b"PAR1", b"\x1f\x8b", b"\xff\xfe"):
        outcome(start + content, kind=kind)


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_scratched_files(data):
    wholes = [saved(np.ones((3, 2))), archived(x=np.ones((3, 2)), y=np.ones(2)), IRIS]
    wholes += [gzip.compress(IRIS, mtime=0), parquet([[1.0, 2.0, None], [1, 2, 3]])]
    content = bytearray(data.draw(st.sampled_from(wholes)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    outcome(bytes(content[: data.draw(st.none() | st.integers(0, len(content)))]))


@settings(deadline=None)
@given(st.text(max_size=20) | st.text(alphabet='id,2- "\n', max_size=8), st.booleans())
def test_any_choice_of_columns(choice, names):
    content = WIDE if names else "1,2,3\n4,5,6\n"
    for option in ("columns", "exclude", "weight_column"):
        outcome(content, **{option: choice})


def test_a_million_rows(tmp_path):
    block = "".join(f"{number}.5,{-number}e-3,7,0.1\n" for number in range(1000))
    path = tmp_path / "large.csv"
    path.write_text("a,b,c,d\n" + block * 1000)
    table = read_table(path)
    assert table.x.shape == (10**6, 4)
    column = np.tile(np.arange(1000), 1000)
    np.testing.assert_array_equal(table.x[:, 0], column + 0.5)
    np.testing.assert_array_equal(table.x[:, 1], -column / 1e3)
    with path.open("a") as file:
        file.write("1,2,NA,4\n")
    table = read_table(path, drop_missing=True)
    assert (table.total_rows, table.dropped) == (10**6 + 1, 1)
    np.testing.assert_array_equal(table.x[:, 0], column + 0.5)
