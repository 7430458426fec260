package keyrow_test

import (
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/schema"
)

func TestNoTwoKeysSlotsOrStripesHaveOneName(t *testing.T) {
	seen := make(map[string]string)
	is := func(what, name string) {
		t.Helper()
		if len(name) == 0 || len(name) > 255 {
			t.Errorf("%s: the name has %d bytes", what, len(name))
		}
		if other, ok := seen[name]; ok {
			t.Errorf("%q keeps %s, and %s", name, what, other)
		}
		seen[name] = what
	}
	is("the number of stripes", schema.Stripes)
	long := strings.Repeat("k", 254)
	keys := []string{"k", "\x00", "\x00\x00", "\x00k", "\x00\x00k", "#", "\x00#", "\x00\x00#", long, long + "k", "\x00" + long, "\x00" + long[1:] + "j", "#" + long, "\x00#" + long[1:]}
	keys = append(keys, // a caller can call its keys what it likes
		schema.Stripes, keyrow.StripeName(0), keyrow.StripeName(17), keyrow.SlotName("k", 1), keyrow.SlotName("\x00k", 12), keyrow.SlotName(long, 3), keyrow.Name("\x00"+long))
	for i := range 100 {
		is("a stripe", keyrow.StripeName(i))
	}
	for _, key := range keys {
		name := keyrow.Name(key)
		is("the key "+key, name)
		if keyrow.SlotName(name, 0) != name {
			t.Errorf("the first slot of %q is not the key itself", key)
		}
		for i := range 30 {
			is("a slot of "+key, keyrow.SlotName(name, i+1))
		}
	}
	if keyrow.Name("order:42") != "order:42" || keyrow.SlotName("order:42", 2) != "\x00slot 2:order:42" {
		t.Error("names do not show their keys")
	}
}

func TestAKeyHasTheSameStripeInAllVersions(t *testing.T) {
	// Programs of other versions must find the same stripe.
	for key, want := range map[string]int{"": 37, "a": 12, "product:42": 48} {
		if got := keyrow.Stripe(key, 64); got != keyrow.StripeName(want) {
			t.Errorf("%q is on %q, want %d", key, got, want)
		}
	}
	counts := make(map[string]int)
	for i := range 10000 {
		counts[keyrow.Stripe(strings.Repeat("k", i%7)+string(rune('a'+i)), 10)]++
	}
	for name, n := range counts {
		if n < 800 || n > 1200 {
			t.Errorf("%d of 10000 keys are on %q, one of 10", n, name)
		}
	}
	if len(counts) != 10 {
		t.Errorf("there are %d stripes, want 10", len(counts))
	}
}

func TestReadTellsWhatTheNameOfARowMeans(t *testing.T) {
	long := strings.Repeat("k", 255)
	zeros := "\x00" + long[:254]
	is := func(name string, want keyrow.Meaning) {
		t.Helper()
		if got, ok := keyrow.Read(name); !ok || got != want {
			t.Errorf("%.40q means %+v, %v, want %+v", name, got, ok, want)
		}
	}
	for _, key := range []string{"k", "#", "\x00", "\x00k", "\x00\x00", "\x00#", long, schema.Stripes, keyrow.StripeName(3), keyrow.SlotName("k", 1)} {
		is(keyrow.Name(key), keyrow.Meaning{Key: key, Stripe: -1})
		if key != long {
			is(keyrow.SlotName(keyrow.Name(key), 12), keyrow.Meaning{Key: key, Stripe: -1, Slot: 12})
		}
	}
	is(keyrow.Name(zeros), keyrow.Meaning{Hashed: true, Stripe: -1})
	is(keyrow.SlotName(long, 2), keyrow.Meaning{Hashed: true, Stripe: -1, Slot: 2})
	is(keyrow.SlotName(keyrow.Name(zeros), 2), keyrow.Meaning{Hashed: true, Stripe: -1, Slot: 2})
	is(keyrow.StripeName(0), keyrow.Meaning{})
	is(keyrow.SlotName(keyrow.StripeName(7), 2), keyrow.Meaning{Stripe: 7, Slot: 2})
	for _, name := range []string{
		"", "\x00", "\x00k", schema.Stripes, "\x00stripe ", "\x00stripe -1", "\x00stripe 01", "\x00stripe 1k",
		"\x00slot 1", "\x00slot :k", "\x00slot 0:k", "\x00slot -1:k", "\x00slot 1:", "\x00slot 1:" + keyrow.SlotName("k", 1), "\x00\x00k",
	} {
		if m, ok := keyrow.Read(name); ok {
			t.Errorf("%q means %+v", name, m)
		}
	}
}
