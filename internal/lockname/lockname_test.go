package lockname

import (
	"strings"
	"testing"
)

func TestNamesOfAdvisoryLocksShowTheirKeysOrAHash(t *testing.T) {
	for _, c := range []struct{ namespace, key, want string }{
		{"shop", "product:42", "mysqllock:shop/product:42"},
		{"", "a_b.c-d", "mysqllock:/a_b.c-d"},
		{"shop", strings.Repeat("k", 49), "mysqllock:shop/" + strings.Repeat("k", 49)},
	} {
		if got := OfAdvisory(c.namespace, c.key); got != c.want {
			t.Errorf("OfAdvisory(%q, %q) is %q, want %q", c.namespace, c.key, got, c.want)
		}
	}
	for key, begin := range map[string]string{
		"Product:42":            "mysqllock:product:42#",
		"a/b":                   "mysqllock:a_b#",
		"a#b":                   "mysqllock:a_b#",
		"a ":                    "mysqllock:a_#",
		"é":                     "mysqllock:__#",
		strings.Repeat("k", 50): "mysqllock:" + strings.Repeat("k", 21) + "#",
	} {
		if got := OfAdvisory("shop", key); !strings.HasPrefix(got, begin) || len(got) != len(begin)+32 {
			t.Errorf("the name of %q is %q, want %q and a hash", key, got, begin)
		}
	}
}

// TestVersionsMeanTheSameWakeUpLocks: programs of different versions run side by side.
func TestVersionsMeanTheSameWakeUpLocks(t *testing.T) {
	if got, want := OfWakeUp("shop", "product:42"), "mysqllock-lease-d312eed13885e1f5f7930d119977523a9f5f545c"; got != want {
		t.Errorf("the wake-up lock is %q, want %q", got, want)
	}
}

// FuzzOfAdvisory: the server's names are short lower-case ASCII, so that no collation
// takes two of them for equal, two keys never share one, and what they tell
// is true.
func FuzzOfAdvisory(f *testing.F) {
	f.Add("shop", "a", "shop", "A")
	f.Add("shop", "é", "shop", "É")
	f.Add("shop", "a", "shop", "a ")
	f.Add("a", "b/c", "a/b", "c")
	f.Add("", "a/b", "a", "b")
	f.Add("Shop", "a", "shop", "a")
	f.Add("A", strings.Repeat("a", 30), "Aa", strings.Repeat("a", 29))
	f.Add("A\x00"+strings.Repeat("_", 30), "b", "A", strings.Repeat("_", 30)+"\x00b")
	f.Add("shop", strings.Repeat("k", 49), "shop", strings.Repeat("k", 50))
	f.Add("shop", strings.Repeat("k", 60), "shop", strings.Repeat("k", 61))
	hashed := OfAdvisory("shop", "A")
	f.Add("shop", "A", "shop", hashed[len("mysqllock:"):])
	f.Fuzz(func(t *testing.T, ns1, key1, ns2, key2 string) {
		a, b := OfAdvisory(ns1, key1), OfAdvisory(ns2, key2)
		for _, name := range []string{a, b} {
			if len(name) > 64 || !strings.HasPrefix(name, "mysqllock:") ||
				strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789_.:-/#") != "" {
				t.Errorf("the name is %q", name)
			}
		}
		ns, key, told := ReadAdvisory(a)
		if told == strings.Contains(a, "#") || told && (ns != ns1 || key != key1) || !IsAdvisory(a) {
			t.Errorf("%q reads as %q in %q, want %q in %q", a, key, ns, key1, ns1)
		}
		same := ns1 == ns2 && key1 == key2
		if (a == b) != same {
			t.Errorf("%q and %q of (%q, %q) and (%q, %q)", a, b, ns1, key1, ns2, key2)
		}
	})
}
