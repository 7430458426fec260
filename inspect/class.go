package inspect

import "strings"

// OtherKeys is the class of keys that are in no other.
const OtherKeys = "other"

// Classes returns a function that says to which class a key belongs: the first of the
// patterns that it matches, in which * stands for any text, or [OtherKeys]. It is for
// web.Options, lockprom.NewWithClasses and lockotel.Options, as keys are too many to be
// counted one by one:
//
//	inspect.Classes("order:*", "product:*:stock", "nightly-report")
func Classes(patterns ...string) func(key string) string {
	parts := make([][]string, len(patterns))
	for i, p := range patterns {
		parts[i] = strings.Split(p, "*")
	}
	return func(key string) string {
		for i, p := range parts {
			if matches(p, key) {
				return patterns[i]
			}
		}
		return OtherKeys
	}
}

// matches reports whether the key is the parts with any text between them.
func matches(parts []string, key string) bool {
	first, last := parts[0], parts[len(parts)-1]
	if len(parts) == 1 {
		return key == first
	}
	rest, found := strings.CutPrefix(key, first)
	if !found {
		return false
	}
	if rest, found = strings.CutSuffix(rest, last); !found {
		return false
	}
	for _, part := range parts[1 : len(parts)-1] {
		if _, rest, found = strings.Cut(rest, part); !found {
			return false
		}
	}
	return true
}
