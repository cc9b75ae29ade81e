"""Words that sites are filled with."""

GIVEN = ("Ada", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Luis")
FAMILY = ("Adler", "Bianchi", "Castro", "Dubois", "Evans", "Fischer", "Garcia", "Horvat", "Ivanov", "Jensen")
COUNTRIES = ("Austria", "Brazil", "Canada", "Denmark", "Estonia", "France", "Ghana", "Hungary", "India", "Japan")
COLOURS = ("black", "blue", "brown", "green", "grey", "orange", "red", "white", "yellow")
GOODS = ("chair", "clock", "kettle", "lamp", "mirror", "mug", "rug", "shelf", "table", "vase")
CITIES = ("Arlen", "Borva", "Celm", "Dorne", "Eskby", "Falun", "Gorin", "Hadley", "Istra", "Jarrow", "Kolm", "Lunde")
RIVERS = ("Amber", "Brisk", "Cold", "Deer", "Elder", "Frost", "Grey", "Heron")
