package inspect

import (
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/lockname"
)

// FuzzOurName: what the advisory strategy calls its locks is safe in a statement,
// and taken for a name.
func FuzzOurName(f *testing.F) {
	for _, key := range []string{"k", "order:42", "A", "é", "a b", "a/b", "a#b", "'", strings.Repeat("k", 255), strings.Repeat("k", 50), "a\x00b", "a\n"} {
		f.Add("shop", key)
		f.Add(key, "k")
	}
	f.Add("", "k")
	f.Fuzz(func(t *testing.T, namespace, key string) {
		if name := lockname.OfAdvisory(namespace, key); !ourName.MatchString(name) {
			t.Errorf("%q is not taken for a name", name)
		}
	})
}

func TestAKeyIsReadFromThePrimaryKeyOfItsRow(t *testing.T) {
	for data, want := range map[string][2]string{
		"0x6E73, 0x6B":           {"ns", "k"},
		"0x6E73, 0x00616227":     {"ns", "\x00ab'"},
		"'', ''":                 {"", ""},
		"'', 0x6b":               {"", "k"},
		"supremum pseudo-record": {"-"},
		"0x6E73":                 {"-"},
		"0x6E7, 0x6B":            {"-"},
		"6E73, 0x6B":             {"-"},
	} {
		namespace, name, ok := readPrimaryKey(data)
		if got := [2]string{namespace, name}; ok != (want[0] != "-") || ok && got != want {
			t.Errorf("%s reads as %q, %v", data, got, ok)
		}
	}
}

func TestHostAndProcessAreReadFromTheOwner(t *testing.T) {
	for owner, want := range map[string]Client{
		"web-1:4711:shop":   {Host: "web-1", PID: 4711},
		"fe80::1:4711:shop": {Host: "fe80::1", PID: 4711},
		"the nightly job":   {},
		"a:b:c":             {},
		"web-1:4711":        {},
	} {
		host, pid := selfNamed(owner)
		if host != want.Host || pid != want.PID {
			t.Errorf("%q is process %d on %q", owner, pid, host)
		}
	}
}
